"""Quantities over the whole vocabulary, computed by engines: entropy, Σπ² and the exact KL divergence.

Loss functions see only the sampled tokens; an engine, which has the logits, computes these quantities and returns them
per token. Logits are ``[B, T, V]`` of any float dtype, and may be normalised log-probs; results are float32 (or
float64) ``[B, T]`` with gradient.
"""

from __future__ import annotations

from torch import Tensor

from rollcast.contracts.algorithm import kl_penalty
from rollcast_algorithms._masking import widen

__all__ = ["entropy", "full", "sum_pi_squared"]


def entropy(logits: Tensor) -> Tensor:
    """Return ``-Σ_v π_v log π_v`` in nats; a probability of 0 adds 0."""
    log_probs = widen(logits).log_softmax(-1)
    # -inf · 0 is NaN, in the value and in the gradient.
    return -(log_probs.exp() * log_probs.masked_fill(log_probs.isneginf(), 0.0)).sum(-1)


def sum_pi_squared(logits: Tensor) -> Tensor:
    """Return ``Σ_v π_v²``, between 1/V and 1, for the optimal token baselines."""
    return widen(logits).softmax(-1).square().sum(-1)


@kl_penalty(needs_vocabulary=True)
def full(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return the exact divergence ``KL(π ‖ π_ref) = Σ_v π_v (log π_v - log π_ref,v)``.

    Args:
        log_probs, ref_log_probs: logits or log-probs, ``[B, T, V]``.

    Returns:
        The divergence, ``[B, T]``, never negative except for rounding; tokens with π = 0 add 0.

    Raises:
        ValueError: the shapes differ, or there is no vocabulary axis.
    """
    if log_probs.shape != ref_log_probs.shape:
        raise ValueError(f"log_probs is {list(log_probs.shape)}, but ref_log_probs is {list(ref_log_probs.shape)}")
    if log_probs.ndim != 3:
        raise ValueError(
            f"full needs the log-probs of the whole vocabulary, [B, T, V], but got {list(log_probs.shape)}; "
            "where only those of the sampled tokens are known, use k1, k2 or k3"
        )
    policy = widen(log_probs).log_softmax(-1)
    distance = policy - widen(ref_log_probs).log_softmax(-1)
    return (policy.exp() * distance.masked_fill(policy.isneginf(), 0.0)).sum(-1)
