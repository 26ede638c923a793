"""Masked inputs of the policy losses."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rollcast.contracts.algorithm import PolicyLossInputs
from rollcast_algorithms._masking import masked

__all__ = ["MAX_LOG_RATIO", "Tokens", "read_tokens", "row_mean"]

MAX_LOG_RATIO = 20.0
"""Bound to which log-ratios are clamped (±), so that ``exp`` stays finite in float32; verl's value."""


@dataclass(frozen=True)
class Tokens:
    """Masked inputs of a policy loss; all ``[B, T]``, float32 or wider, zero where the mask is zero.

    Attributes:
        log_probs, old_log_probs, advantages: inputs of the loss.
        raw_log_ratio: ``log π - log π_old``.
        log_ratio: ``raw_log_ratio``, clamped to ±20.
        kl: negative clamped log-ratio, without gradient; verl's metric ppo_kl.
        chosen: mask of the policy's tokens, bool.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    raw_log_ratio: Tensor
    log_ratio: Tensor
    kl: Tensor
    chosen: Tensor


def read_tokens(inputs: PolicyLossInputs) -> Tokens:
    """Mask the inputs of a policy loss.

    Raises:
        ValueError: the shapes differ.
    """
    chosen = inputs.response_mask != 0
    new = masked("log_probs", inputs.log_probs, chosen)
    old = masked("old_log_probs", inputs.old_log_probs, chosen)
    advantages = masked("advantages", inputs.advantages, chosen)
    raw = new - old
    log_ratio = raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return Tokens(new, old, advantages, raw, log_ratio, -log_ratio.detach(), chosen)


def row_mean(values: Tensor, tokens: Tokens) -> Tensor:
    """Return each row's mean of ``values`` (zero where masked) over its tokens, ``[B, 1]``; 0 without tokens."""
    counts = tokens.chosen.sum(-1, keepdim=True).clamp(min=1)
    return values.sum(-1, keepdim=True) / counts
