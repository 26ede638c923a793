import torch

from rollcast.contracts.algorithm import AdvantageInputs
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
