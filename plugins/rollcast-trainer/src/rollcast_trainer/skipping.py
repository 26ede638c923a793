"""Rows without advantage: which they are, and whether an update may leave them out."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from rollcast.contracts.algorithm import Denominators
from rollcast.contracts.engine import LossInputs
from rollcast.errors import ConfigError
from rollcast.protocol import DataProto
from rollcast_algorithms.losses import PpoLoss

__all__ = ["needs_advantage", "without_advantage"]


def needs_advantage(loss: PpoLoss) -> bool:
    """Whether a row with zero advantages has no gradient, so that it may be left out of an update.

    Terms beside the policy loss always have one. The policy loss itself is tried on a few tokens,
    which also finds options that it refuses.

    Raises:
        ConfigError: it does not take its options.
    """
    generator = torch.Generator().manual_seed(0)
    old = torch.rand((4, 16), generator=generator).log()
    new = (old + torch.randn((4, 16), generator=generator)).requires_grad_()
    mask, nothing = torch.ones(4, 16, dtype=torch.int64), torch.zeros(4, 16)
    try:
        columns = {"old_log_probs": old, "advantages": nothing, **loss.prepare(old, nothing, mask)}
        tried = replace(loss, use_rollout_is_weights=False, entropy_coeff=0.0, kl_penalty=None, kl_loss_coef=0.0)
        counts = Denominators(64.0, 4.0, 16.0)
        total = tried(LossInputs(new, None, None, mask, columns, counts)).loss
    except (ValueError, TypeError, LookupError) as error:
        raise ConfigError(f"actor.policy_loss does not work with the settings in actor: {error}") from error
    if loss.entropy_coeff or loss.kl_penalty is not None:
        return False
    if not total.requires_grad:
        return True
    (gradient,) = torch.autograd.grad(total, new, allow_unused=True)
    return gradient is None or not bool(gradient.any())


def without_advantage(batch: DataProto) -> torch.Tensor:
    """Rows (bool ``[B]``) whose advantage is zero at every token."""
    return cast("torch.Tensor", batch["advantages"].abs().amax(-1) == 0)
