import torch

from rollcast.contracts.algorithm import Denominators
from rollcast_testing import LossAggregationSuite


class TestMyPlugin(LossAggregationSuite):
    name = "my_plugin"
    is_mean = False
    # (1 + 3 + 4 + 4) / sqrt(4) and 5 / sqrt(1), over two sequences.
    examples = (
        (
            torch.tensor([[1.0, 3.0, 4.0, 4.0], [5.0, 9.0, 9.0, 9.0]]),
            torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]]),
            Denominators(5.0, 2.0, 4.0),
            5.5,
        ),
    )
