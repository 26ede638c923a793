import math

import torch

from rollcast.contracts.algorithm import PolicyLossInputs
from rollcast_testing import PolicyLossSuite


def token(log_prob, old_log_prob, advantage, **options):
    """Return inputs with one row of one token."""
    columns = [torch.tensor([[value]]) for value in (log_prob, old_log_prob, advantage)]
    return PolicyLossInputs(*columns, torch.ones(1, 1), options=options)


class TestMyPlugin(PolicyLossSuite):
    name = "my_plugin"
    examples = [
        (token(-1.0, -1.0, 3.0), [[3.0]]),
        (token(-1.0, -1.0 - math.log(4.0), 3.0), [[6.0]]),  # the ratio 4 is capped at 2
        (token(-1.0, -1.0 - math.log(4.0), 3.0, cap=5.0), [[12.0]]),
    ]
