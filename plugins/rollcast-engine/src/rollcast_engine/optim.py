"""The registry of optimizers, and the optimizers of this distribution.

Example of an optimizer, to be registered in the entry-point group ``rollcast.optimizers``::

    def rmsprop(parameters: Iterable[Parameter], optim: OptimConfig, lr: float) -> Optimizer:
        return torch.optim.RMSprop(parameters, lr=lr, weight_decay=optim.weight_decay, **optim.optimizer_kwargs)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rollcast.errors import ConfigError
from rollcast.plugins import Registry, is_callable
from rollcast_engine.schedule import check_schedule, learning_rate

if TYPE_CHECKING:
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from rollcast.contracts.engine import OptimConfig

__all__ = [
    "OptimizerFactory",
    "adamw",
    "adamw_8bit",
    "build_optimizer",
    "check_optim",
    "learning_rate",
    "optimizers",
    "prime_optimizer",
    "set_lr",
    "sgd",
]

#: Devices for which torch has a fused AdamW.
_FUSED = frozenset({"cpu", "cuda", "xpu", "mps"})


class OptimizerFactory(Protocol):
    """A function that builds an optimizer over an engine's trainable parameters, which may be DTensors.

    Its per-parameter state must consist of tensors, because checkpoints keep nothing else. The state may
    exist from the start or appear at the first step.
    """

    def __call__(self, parameters: Iterable[Parameter], optim: OptimConfig, lr: float) -> Optimizer:
        """Return the optimizer; its first step uses ``lr``.

        Raises:
            TypeError: ``optim.optimizer_kwargs`` has an unknown option.
        """
        ...


optimizers: Registry[OptimizerFactory] = Registry(
    "rollcast.optimizers", is_callable(3), "actor.optim.optimizer", description="optimizers of the training engines"
)


def check_optim(optim: OptimConfig, path: str = "actor.optim") -> None:
    """Check the settings of optimizer and schedule.

    Args:
        optim: the config section.
        path: dotted path of the section, for messages.

    Raises:
        ConfigError: a value is invalid; the message names the key, its value and valid ones.
        PluginError: the optimizer does not exist.
    """
    optimizers.get(optim.optimizer, requested_by=f"{path}.optimizer")
    check_schedule(optim, path)


def build_optimizer(parameters: Iterable[Parameter], optim: OptimConfig) -> Optimizer:
    """Return the optimizer that ``optim`` names over the trainable parameters, at the schedule's first learning rate.

    Raises:
        ConfigError: the optimizer rejects ``optim.optimizer_kwargs``, or no parameter is trainable.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise ConfigError("there is nothing to train: no parameter of the model requires a gradient")
    try:
        return optimizers.get(optim.optimizer)(trained, optim, learning_rate(optim, 0))
    except (TypeError, ValueError) as error:
        options = f"with optim.optimizer_kwargs={dict(optim.optimizer_kwargs)}"
        raise ConfigError(f"optim.optimizer={optim.optimizer} cannot be built {options}: {error}") from error


def adamw(parameters: Iterable[Parameter], optim: OptimConfig, lr: float) -> Optimizer:
    """Return AdamW, fused if the device supports it, with its state already allocated.

    Torch creates the state at the first step. Created here, checkpoints have the same entries before and after that
    step, and loading needs no extra step to allocate them.
    """
    parameters = list(parameters)
    beta1, beta2 = optim.betas
    fused = all(parameter.device.type in _FUSED for parameter in parameters)
    options = {"fused": fused, **optim.optimizer_kwargs}
    optimizer = torch.optim.AdamW(
        parameters, lr=lr, betas=(beta1, beta2), eps=optim.eps, weight_decay=optim.weight_decay, **options
    )
    if not options.get("amsgrad"):
        for parameter in parameters:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
    return optimizer


def adamw_8bit(parameters: Iterable[Parameter], optim: OptimConfig, lr: float) -> Optimizer:
    """Return torchao's AdamW with both moments in 8 bits and a scale for each block of 256 numbers.

    The moments take 2.03 bytes per parameter instead of 8 in float32. Parameters with fewer than 4,096 numbers keep
    float32 moments. Options are torchao's: ``block_size``, ``bf16_stochastic_round``.

    Raises:
        ConfigError: torchao is not installed.
    """
    try:
        from torchao.optim import AdamW8bit  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError as error:
        raise ConfigError(
            f"optim.optimizer=adamw_8bit needs torchao, which cannot be imported ({error}); "
            "pip install 'rollcast-engine[torchao]'"
        ) from error
    beta1, beta2 = optim.betas
    options = {"betas": (beta1, beta2), "eps": optim.eps, "weight_decay": optim.weight_decay, **optim.optimizer_kwargs}
    optimizer: Optimizer = AdamW8bit(list(parameters), lr=lr, **options)
    return optimizer


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of all groups; torchao's optimizers keep it in a tensor, which must stay the same."""
    for group in optimizer.param_groups:
        _set_rate(group, lr)


def _set_rate(group: dict[str, Any], lr: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def sgd(parameters: Iterable[Parameter], optim: OptimConfig, lr: float) -> Optimizer:
    """Stochastic gradient descent; ``momentum`` and ``nesterov`` are set by ``optim.optimizer_kwargs``."""
    return torch.optim.SGD(parameters, lr=lr, weight_decay=optim.weight_decay, **optim.optimizer_kwargs)


def prime_optimizer(optimizer: Optimizer) -> None:
    """Create the state of an optimizer that creates it lazily, so that a checkpoint can be loaded into it.

    This takes a step with learning rate zero on zero gradients, which leaves the parameters unchanged. Does nothing if
    there is state already.

    Raises:
        RuntimeError: there are gradients, which the step would apply and drop.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(optimizer.state.get(parameter) for parameter in parameters):
        return
    if any(parameter.grad is not None for parameter in parameters):
        raise RuntimeError("an optimizer cannot be primed between a backward pass and its step")
    before = [(float(group["lr"]), group.get("weight_decay")) for group in optimizer.param_groups]
    set_lr(optimizer, 0.0)
    for group in optimizer.param_groups:
        if "weight_decay" in group:
            group["weight_decay"] = 0.0
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    finally:
        for group, (rate, decay) in zip(optimizer.param_groups, before, strict=True):
            _set_rate(group, rate)
            if "weight_decay" in group:
                group["weight_decay"] = decay
        optimizer.zero_grad(set_to_none=True)
