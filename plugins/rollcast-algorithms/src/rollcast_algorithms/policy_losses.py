"""Policy losses: per-token surrogates whose gradient improves the policy."""

from __future__ import annotations

import torch

from rollcast.contracts.algorithm import PolicyLossInputs, PolicyLossOutput
from rollcast_algorithms._masking import masked

__all__ = ["MAX_LOG_RATIO", "vanilla"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this, so that ``exp`` stays finite in float32; verl's value."""


def vanilla(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """PPO's clipped surrogate, with clip-higher and dual clip.

    With ``ratio = exp(clamp(log π - log π_old, ±20))`` and low, high and c the three clip ratios::

        L  = max(-A · ratio, -A · clamp(ratio, 1 - low, 1 + high))
        L  = min(L, -A · c)      where A < 0

    The second line bounds the loss of a token that has become far likelier although it was bad.
    Where the log-ratio is clamped the gradient is zero.

    Metrics, per token: ``clip_fraction`` (the first line's clip was active), ``clip_fraction_lower``
    (the second's was), ``kl`` (the estimate ``log π_old - log π``, which verl calls ppo_kl).

    Sources: Schulman et al. 2017, Proximal Policy Optimization Algorithms, arXiv:1707.06347; Ye et
    al. 2020, Mastering Complex Control in MOBA Games, arXiv:1912.09729 (dual clip); Yu et al. 2025,
    DAPO, arXiv:2503.14476 (clip-higher).

    Args:
        inputs: all tensors ``[B, T]``.

    Returns:
        Losses and metrics, float32 ``[B, T]``, zero where the mask is zero.

    Raises:
        ValueError: ``clip_ratio_c`` is not above 1, a clip ratio is negative, or shapes differ.
    """
    low, high, dual = inputs.clip_ratio_low, inputs.clip_ratio_high, inputs.clip_ratio_c
    if not dual > 1.0:
        raise ValueError(f"clip_ratio_c must be greater than 1, got {dual}")
    if not (low >= 0.0 and high >= 0.0):
        raise ValueError(f"clip_ratio_low and clip_ratio_high must not be negative, got {low} and {high}")
    mask = inputs.response_mask
    new = masked("log_probs", inputs.log_probs, mask)
    old = masked("old_log_probs", inputs.old_log_probs, mask)
    advantages = masked("advantages", inputs.advantages, mask)

    log_ratio = (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    surrogate = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    clipped = torch.maximum(surrogate, bounded)
    ceiling = -advantages * dual
    bad = advantages < 0
    losses = torch.where(bad, torch.minimum(clipped, ceiling), clipped)
    metrics = {
        "clip_fraction": (bounded > surrogate).to(losses.dtype),
        "clip_fraction_lower": (bad & (clipped > ceiling)).to(losses.dtype),
        "kl": -log_ratio.detach(),
    }
    return PolicyLossOutput(losses, metrics)
