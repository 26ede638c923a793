"""Learning-rate schedules: a warm-up, then a constant, a decay, or a plateau with a final decay."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING

from rollcast.errors import ConfigError

if TYPE_CHECKING:
    from rollcast.contracts.engine import OptimConfig

__all__ = ["check_schedule", "learning_rate", "warmup_steps"]

#: Remaining share of the range from floor to peak, as a function of the decay's progress from 0 to 1. ``minus_sqrt`` is
#: ``1 - sqrt`` of Hägele et al., Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations (2024).
_DECAYS = MappingProxyType[str, Callable[[float], float]](
    {
        "linear": lambda progress: 1.0 - progress,
        "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
        "minus_sqrt": lambda progress: 1.0 - math.sqrt(progress),
    }
)


def check_schedule(optim: OptimConfig, path: str = "actor.optim") -> None:
    """Check the settings of the schedule.

    Args:
        optim: the config section.
        path: dotted path of the section, for messages.

    Raises:
        ConfigError: a value is invalid; the message names the key, its value and valid ones.
    """
    kind, total = optim.lr_scheduler_type, optim.total_training_steps
    by_ratio = optim.lr_warmup_steps < 0 and optim.lr_warmup_steps_ratio > 0
    if total < 1 and (kind != "constant" or by_ratio):
        why = f"lr_warmup_steps_ratio={optim.lr_warmup_steps_ratio}" if by_ratio else f"lr_scheduler_type={kind}"
        raise ConfigError(
            f"{path}.{why} needs {path}.total_training_steps, which is {total}; the trainer usually sets it"
        )
    if kind == "wsd":
        _check_wsd(optim, path)


def _check_wsd(optim: OptimConfig, path: str) -> None:
    decay, warmup, total = _wsd_decay_steps(optim), warmup_steps(optim), optim.total_training_steps
    if warmup + decay > total:
        raise ConfigError(
            f"a warm-up of {warmup} steps and a decay of {decay} ({path}.lr_wsd_decay_steps) do not fit into "
            f"{path}.total_training_steps={total}"
        )


def warmup_steps(optim: OptimConfig) -> int:
    """Return the number of scheduler steps of the warm-up."""
    if optim.lr_warmup_steps >= 0:
        return optim.lr_warmup_steps
    return int(optim.lr_warmup_steps_ratio * max(optim.total_training_steps, 0))


def learning_rate(optim: OptimConfig, step: int) -> float:
    """Return the learning rate after ``step`` scheduler steps."""
    warmup = warmup_steps(optim)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    if optim.lr_scheduler_type == "constant":
        return optim.lr
    total = optim.total_training_steps
    if optim.lr_scheduler_type == "wsd":
        start, share = total - _wsd_decay_steps(optim), _DECAYS[optim.lr_wsd_decay_style]
    else:
        start, share = warmup, _DECAYS[optim.lr_scheduler_type]
    progress = min(1.0, max(0.0, (step - start) / max(1, total - start)))
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * share(progress))


def _wsd_decay_steps(optim: OptimConfig) -> int:
    if optim.lr_wsd_decay_steps is not None:
        return optim.lr_wsd_decay_steps
    return max(1, optim.total_training_steps // 10)
