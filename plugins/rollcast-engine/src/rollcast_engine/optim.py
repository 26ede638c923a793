"""The optimizer and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from rollcast.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rollcast.contracts.engine import OptimConfig

__all__ = ["AdamWState", "build_optimizer", "check_optim", "learning_rate"]

SCHEDULES = ("constant", "linear", "cosine")
#: AdamW's per-parameter state.
AdamWState = dict[str, "Tensor"]


def check_optim(optim: OptimConfig) -> None:
    """Refuse values that make no schedule.

    Raises:
        ConfigError: names the key, its value and what is valid.
    """
    if optim.lr_scheduler_type not in SCHEDULES:
        valid = ", ".join(SCHEDULES)
        raise ConfigError(f"optim.lr_scheduler_type is {optim.lr_scheduler_type!r}; valid: {valid}")
    if optim.lr_scheduler_type != "constant" and optim.total_training_steps < 1:
        raise ConfigError(
            f"optim.lr_scheduler_type={optim.lr_scheduler_type} needs optim.total_training_steps, "
            f"which is {optim.total_training_steps}; the trainer usually fills it in"
        )
    if not optim.clip_grad > 0:
        raise ConfigError(f"optim.clip_grad is {optim.clip_grad}, it must be above 0 (inf for no clipping)")
    if len(optim.betas) != 2:
        raise ConfigError(f"optim.betas is {optim.betas}, it must be two numbers")


def learning_rate(optim: OptimConfig, step: int) -> float:
    """The learning rate after ``step`` scheduler steps."""
    if step < optim.lr_warmup_steps:
        return optim.lr * (step + 1) / optim.lr_warmup_steps
    if optim.lr_scheduler_type == "constant":
        return optim.lr
    decay_steps = max(1, optim.total_training_steps - optim.lr_warmup_steps)
    progress = min(1.0, (step - optim.lr_warmup_steps) / decay_steps)
    share = 1.0 - progress if optim.lr_scheduler_type == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * share)


def build_optimizer(parameters: Iterable[nn.Parameter], optim: OptimConfig) -> torch.optim.AdamW:
    """Fused AdamW at the schedule's first learning rate, with its state already in place.

    Torch makes the state at the first step; made here, a checkpoint has the same entries before
    and after it, and loading needs no step to make room.
    """
    beta1, beta2 = optim.betas
    optimizer = torch.optim.AdamW(
        parameters,
        lr=learning_rate(optim, 0),
        betas=(beta1, beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        fused=True,
    )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
    return optimizer
