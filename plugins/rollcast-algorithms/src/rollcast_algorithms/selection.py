"""Selections of the tokens on which a policy loss acts; denominators, KL penalty and entropy bonus keep all tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from rollcast_algorithms._masking import masked

__all__ = ["keep_near_rows", "select_high_entropy"]


def keep_near_rows(
    log_probs: Tensor, sampled_log_probs: Tensor, advantages: Tensor, mask: Tensor, threshold: float
) -> Tensor:
    """Return the tokens outside rows that are bad and far from the policy that sampled them, bool ``[B, T]``.

    With ``n_i`` the tokens of row i under the mask, and π_s the policy that sampled::

        keep = A ≥ 0  or  Σ_t (log π_s - log π) / n_i ≤ threshold

    Source: DeepSeek-AI 2025, DeepSeek-V3.2, arXiv:2512.02556, equation 9 (off-policy sequence masking); TRL's
    ``off_policy_mask_threshold``.

    Args:
        log_probs, sampled_log_probs, advantages, mask: all ``[B, T]``.
        threshold: largest divergence of a row that is kept, in nats per token.

    Raises:
        ValueError: the shapes differ.
    """
    new = masked("log_probs", log_probs, mask).detach()
    gap = masked("sampled_log_probs", sampled_log_probs, mask) - new
    counts = (mask != 0).sum(-1, keepdim=True).clamp(min=1)
    near = gap.sum(-1, keepdim=True) / counts <= threshold
    return (masked("advantages", advantages, mask) >= 0) | near


def select_high_entropy(entropy: Tensor, mask: Tensor, share: float) -> Tensor:
    """Return the tokens with the highest entropy, float32 in the shape of ``mask``, 1 where kept.

    ``entropy ≥ q`` is kept, with q the quantile ``1 - share`` of all tokens under the mask, interpolated linearly
    between neighbours. The quantile compares all tokens of the inputs, so it is taken over the whole batch, before the
    update.

    Source: Wang et al. 2025, Beyond the 80/20 Rule, arXiv:2506.01939; TRL's ``top_entropy_quantile``.

    Args:
        entropy: entropy of the policy at each token, in nats.
        mask: mask of the policy's tokens, in the same shape.
        share: share of the tokens to keep, 0 (only the highest) to 1.

    Raises:
        ValueError: the shapes differ.
    """
    values = masked("entropy", entropy, mask)
    ordered = values[mask != 0].sort().values
    if not len(ordered):
        return torch.zeros_like(values, dtype=torch.float32)
    # torch.quantile has an upper limit of 16 million values.
    place = (1.0 - share) * (len(ordered) - 1)
    low, high = ordered[int(place)], ordered[min(int(place) + 1, len(ordered) - 1)]
    threshold = torch.lerp(low, high, place - int(place))
    return ((values >= threshold) & (mask != 0)).float()
