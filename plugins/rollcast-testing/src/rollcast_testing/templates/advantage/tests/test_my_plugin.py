import pytest
import torch

from rollcast.contracts.algorithm import AdvantageInputs
from rollcast_my_plugin import my_plugin
from rollcast_testing import AdvantageSuite


def scored(scores, groups, **options):
    """Return inputs with one token a response."""
    rewards = torch.tensor(scores).unsqueeze(-1)
    return AdvantageInputs(rewards, torch.ones_like(rewards), torch.tensor(groups), options=options)


class TestMyPlugin(AdvantageSuite):
    name = "my_plugin"
    examples = [
        (scored([4.0, 1.0, 1.0, 3.0], [0, 0, 0, 1]), [[2.0], [-1.0], [-1.0], [0.0]]),
        (scored([1.0, 0.0], [0, 0], scale=2.0), [[1.0], [-1.0]]),
    ]


def test_a_typo_is_an_error():
    with pytest.raises(ValueError, match="no option scael"):
        my_plugin(scored([1.0, 0.0], [0, 0], scael=2.0))
