"""Per-token estimates of KL(π ‖ π_ref) from samples of π, named as in Schulman's note.

``d`` is ``log π_ref - log π`` of the sampled token. Source: J. Schulman 2020, Approximating KL Divergence,
http://joschu.net/blog/kl-approx.html. All functions take ``log_probs`` and ``ref_log_probs`` of the same shape, usually
``[B, T]``, and return this shape in float32 or wider; different shapes raise ValueError. They take no mask: a caller
with a mask fills masked inputs with finite values and masks the result.

The forms with a ``+`` have the value of their estimate and the gradient of k2, ``k2 - sg(k2) + sg(estimate)`` with sg
the stop-gradient. In expectation, the gradient of k2 is that of the divergence; the gradients of k1, abs and k3 are
not. Use these forms in a loss; in a reward, only the value matters. The exact divergence over the vocabulary, ``full``,
is in :mod:`rollcast_algorithms.vocabulary`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollcast.contracts.algorithm import KlPenalty
from rollcast_algorithms._masking import widen

__all__ = ["MAX_K3", "MAX_LOG_RATIO", "absolute", "absolute_plus", "k1", "k1_plus", "k2", "k2_plus", "k3", "k3_plus"]

MAX_LOG_RATIO = 20.0
"""k3 clamps ``d`` to ± this before ``exp``; verl's value."""

MAX_K3 = 10.0
"""k3 clamps its result to ± this; verl's value."""


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return ``-d``: unbiased, with high variance, negative for half of the tokens (verl's ``kl``).

    Its gradient does not depend on the reference and has mean zero, so use it in a reward, not in a loss.
    """
    return -_log_ratio(log_probs, ref_log_probs)


def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return ``|d|``: biased, never negative; registered as ``abs``."""
    return _log_ratio(log_probs, ref_log_probs).abs()


def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return ``d² / 2``: biased, never negative; its gradient is that of the KL (verl's ``mse``)."""
    return 0.5 * _log_ratio(log_probs, ref_log_probs).square()


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return ``exp(d) - 1 - d``: unbiased, never negative, with low variance (verl's ``low_var_kl``).

    As in verl, ``d`` is clamped to ±20 and the result to ±10, so that a single token cannot make the loss explode.
    Where a clamp is active, the estimate is biased and its gradient is zero.
    """
    d = _log_ratio(log_probs, ref_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1 keeps the digits that exp(d) - 1 would lose if the policies are close.
    return (torch.expm1(d) - d).clamp(-MAX_K3, MAX_K3)


def k1_plus(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return the value of :func:`k1` with the gradient of :func:`k2`; registered as ``k1+``."""
    return _straight_through(k1, log_probs, ref_log_probs)


def absolute_plus(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return the value of :func:`absolute` with the gradient of :func:`k2`; registered as ``abs+``."""
    return _straight_through(absolute, log_probs, ref_log_probs)


def k2_plus(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return :func:`k2`; registered as ``k2+``."""
    return k2(log_probs, ref_log_probs)


def k3_plus(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return the value of :func:`k3` with the gradient of :func:`k2`; registered as ``k3+``."""
    return _straight_through(k3, log_probs, ref_log_probs)


def _straight_through(estimate: KlPenalty, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    slope = k2(log_probs, ref_log_probs)
    return slope - slope.detach() + estimate(log_probs.detach(), ref_log_probs).detach()


def _log_ratio(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    if log_probs.shape != ref_log_probs.shape:
        raise ValueError(f"log_probs is {list(log_probs.shape)}, but ref_log_probs is {list(ref_log_probs.shape)}")
    return widen(ref_log_probs) - widen(log_probs)
