"""The contract of optimizers and their learning-rate schedule.

Example of an optimizer, to be registered in ``rollcast.optimizers``::

    def rmsprop(parameters: Iterable[Parameter], optim: OptimConfig, lr: float) -> Optimizer:
        return torch.optim.RMSprop(parameters, lr=lr, weight_decay=optim.weight_decay, **optim.optimizer_kwargs)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rollcast.plugins import Registry, is_callable

if TYPE_CHECKING:
    from torch.nn import Parameter
    from torch.optim import Optimizer

__all__ = ["OptimConfig", "OptimizerFactory", "optimizers"]


@dataclass
class OptimConfig:
    """An optimizer and its learning-rate schedule; the config's ``actor.optim``. Names are verl's where it has one.

    Attributes:
        optimizer: name in ``rollcast.optimizers``.
        optimizer_kwargs: its further options.
        lr: peak learning rate.
        lr_warmup_steps: scheduler steps over which it rises linearly from ``lr / lr_warmup_steps``; -1 for
            ``lr_warmup_steps_ratio``.
        lr_warmup_steps_ratio: the same as a share of ``total_training_steps``.
        lr_scheduler_type: after the warm-up: ``constant``; ``linear`` or ``cosine`` decay; or ``wsd``
            (warm-up, stable, decay), which decays in the last steps only.
        lr_wsd_decay_steps: how many; empty for a tenth of ``total_training_steps``.
        lr_wsd_decay_style: of that decay: ``linear``, ``cosine`` or ``minus_sqrt``.
        min_lr_ratio: the schedule ends at ``lr * min_lr_ratio``.
        total_training_steps: length of the schedule, in scheduler steps; the trainer fills it in.
        betas, eps: AdamW's.
        weight_decay: decoupled for AdamW, added to the gradient for SGD.
        clip_grad: largest norm of the gradient.
    """

    optimizer: str = "adamw"
    optimizer_kwargs: dict[str, Any] = field(default_factory=dict)
    lr: float = 1e-6
    lr_warmup_steps: int = -1
    lr_warmup_steps_ratio: float = 0.0
    lr_scheduler_type: str = "constant"
    lr_wsd_decay_steps: int | None = None
    lr_wsd_decay_style: str = "linear"
    min_lr_ratio: float = 0.0
    total_training_steps: int = -1
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_grad: float = 1.0


class OptimizerFactory(Protocol):
    """Makes an optimizer over an engine's trainable parameters, which may be sharded (DTensor).

    Its per-parameter state must consist of tensors, because checkpoints keep nothing else. It may have
    that state from the start, or make it at its first step.
    """

    def __call__(self, parameters: Iterable[Parameter], optim: OptimConfig, lr: float) -> Optimizer:
        """The optimizer, to step with ``lr`` first.

        Raises:
            TypeError: ``optim.optimizer_kwargs`` has an option that it does not know.
        """
        ...


optimizers: Registry[OptimizerFactory] = Registry(
    "rollcast.optimizers", is_callable(3), "actor.optim.optimizer", description="optimizers of the training engines"
)
