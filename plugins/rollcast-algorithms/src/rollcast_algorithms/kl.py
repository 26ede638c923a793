"""Per-token estimates of KL(π ‖ π_ref) from samples of π, named as in Schulman's note.

With ``d = log π_ref - log π`` of the sampled token; source: J. Schulman 2020, Approximating KL
Divergence, http://joschu.net/blog/kl-approx.html. All take ``log_probs`` and ``ref_log_probs`` of
one shape, usually ``[B, T]``, and return that shape in float32 or wider; different shapes raise
ValueError. They know no mask: a caller who has one fills what is under its zeros before, and
masks the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollcast_algorithms._masking import widen

__all__ = ["MAX_K3", "MAX_LOG_RATIO", "k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""k3 clamps ``d`` to ± this before ``exp``; verl's value."""

MAX_K3 = 10.0
"""k3 clamps its result to ± this; verl's value."""


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """``-d``: unbiased, of high variance, negative for half of the tokens (verl's ``kl``).

    Its gradient does not depend on the reference and has mean zero: use it in a reward, not in a
    loss.
    """
    return -_log_ratio(log_probs, ref_log_probs)


def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """``d² / 2``: biased, never negative; its gradient is that of the KL (verl's ``mse``)."""
    return 0.5 * _log_ratio(log_probs, ref_log_probs).square()


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """``exp(d) - 1 - d``: unbiased, never negative, of low variance (verl's ``low_var_kl``).

    As in verl, ``d`` is clamped to ±20 and the result to ±10, so that one token cannot make the
    loss explode; where a clamp is active the estimate is biased and its gradient is zero.
    """
    d = _log_ratio(log_probs, ref_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1 keeps the digits that exp(d) - 1 loses where the policies are close.
    return (torch.expm1(d) - d).clamp(-MAX_K3, MAX_K3)


def _log_ratio(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    if log_probs.shape != ref_log_probs.shape:
        raise ValueError(f"log_probs is {list(log_probs.shape)}, but ref_log_probs is {list(ref_log_probs.shape)}")
    return widen(ref_log_probs) - widen(log_probs)
