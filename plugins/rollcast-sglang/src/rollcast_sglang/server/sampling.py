"""The arithmetic of sampling, without SGLang. Axes: ``B`` rows, ``V`` vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["filter_probs", "pick_tokens", "uniform_numbers"]


def filter_probs(probs: Tensor, top_ks: Tensor, top_ps: Tensor, untouched: Tensor) -> None:
    """Keep each row's ``top_k`` likeliest tokens, then the likeliest of these that hold ``top_p``; in place.

    Args:
        probs: float ``[B, V]``; renormalized to sum 1.
        top_ks: integers ``[B]``, at least 1.
        top_ps: float ``[B]``.
        untouched: bool ``[B]``, True for rows that stay unchanged.
    """
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(probs.shape[-1], device=probs.device)
    ordered = ordered.masked_fill(ranks >= top_ks[:, None], 0)
    before = ordered.cumsum(-1) - ordered
    ordered = ordered.masked_fill(before >= top_ps[:, None] * ordered.sum(-1, keepdim=True), 0)
    ordered /= ordered.sum(-1, keepdim=True)
    filtered = torch.empty_like(probs).scatter_(-1, order, ordered)
    probs.copy_(torch.where(untouched[:, None], probs, filtered))


def pick_tokens(probs: Tensor, numbers: Tensor) -> Tensor:
    """Return for each row the token whose interval of the cumulative distribution contains the row's number.

    Args:
        probs: float ``[B, V]``.
        numbers: float64 ``[B]`` in [0, 1).

    Returns:
        int64 ``[B]``; each token has a probability above 0.
    """
    edges = probs.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(edges, (numbers * edges[:, -1])[:, None], right=True)[:, 0]


def uniform_numbers(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return a deterministic number in [0, 1) for each seed and position.

    Args:
        seeds, positions: integers ``[B]``.

    Returns:
        float64 ``[B]`` with 52 random bits.
    """
    mixed = _mix(_mix(seeds.long()) + positions.long())
    return _shift(mixed, 12).double() / 2**52


def _mix(values: Tensor) -> Tensor:
    """Apply SplitMix64's finalizer on int64 that wraps around."""
    values = values + -7046029254386353131
    values = (values ^ _shift(values, 30)) * -4658895280553007687
    values = (values ^ _shift(values, 27)) * -7723592293110705685
    return values ^ _shift(values, 31)


def _shift(values: Tensor, count: int) -> Tensor:
    """Shift right and fill with zeros, as if unsigned."""
    return (values >> count) & ((1 << (64 - count)) - 1)
