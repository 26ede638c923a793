import torch

from rollcast_engine.testing import OptimizerSuite


class TestMyPlugin(OptimizerSuite):
    name = "my_plugin"

    def reference(self, parameters, optim, lr):
        return torch.optim.NAdam(
            parameters, lr=lr, weight_decay=optim.weight_decay, decoupled_weight_decay=True, foreach=False
        )
