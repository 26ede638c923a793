import torch

from rollcast_testing import KlPenaltySuite


class TestMyPlugin(KlPenaltySuite):
    name = "my_plugin"
    unbiased_gradient = True
    # The log-ratios are 0.5 and -3.
    examples = ((torch.tensor([[-1.0, -4.0]]), torch.tensor([[-1.5, -1.0]]), torch.tensor([[0.125, 2.5]])),)
