"""The optimizer ``my_plugin``: NAdam with decoupled weight decay."""

from collections.abc import Iterable

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from rollcast.contracts.engine import OptimConfig


def my_plugin(parameters: Iterable[Parameter], optim: OptimConfig, lr: float) -> Optimizer:
    """Return the optimizer over an engine's parameters, which may be shards.

    Args:
        parameters: trainable parameters; can be read once.
        optim: section ``actor.optim``; further options are in ``optimizer_kwargs``.
        lr: first learning rate. The engine sets ``lr`` of the parameter groups before each step.
    """
    beta1, beta2 = optim.betas
    return torch.optim.NAdam(
        parameters,
        lr=lr,
        betas=(beta1, beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        decoupled_weight_decay=True,
        **optim.optimizer_kwargs,
    )
