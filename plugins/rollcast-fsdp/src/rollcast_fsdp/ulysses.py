"""Sequence parallelism: each rank holds a part of the tokens, and during attention a part of the heads.

The scheme of "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models" (Jacobs et al., 2023): around attention, an all-to-all exchanges parts of the sequence for heads. Axes: ``H``
heads, ``N`` tokens of all ranks together, ``n = N / ranks`` of one rank, ``D`` dimensions of a head.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["all_heads", "all_tokens", "repeat_heads", "sum_over"]


class _AllToAll(torch.autograd.Function):
    """All-to-all that sends part ``i`` of the first dimension to rank ``i``. It is its own inverse and gradient."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchange(parts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradients[0], ctx.group), None


def _exchange(parts: Tensor, group: Any) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


class _SumOver(torch.autograd.Function):
    """Sum over the ranks that every rank receives.

    All ranks compute the same loss from the sum, so the gradient of the sum is already the gradient of each rank's
    summand.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def all_tokens(heads: Tensor, group: Any) -> Tensor:
    """Exchange ``[1, H, n, D]``, all heads of this rank's tokens, for ``[1, H / ranks, N, D]``."""
    ranks = dist.get_world_size(group)
    _, count, length, dimension = heads.shape
    parts: Any = _AllToAll.apply(  # type: ignore[no-untyped-call]
        heads.reshape(ranks, count // ranks, length, dimension), group
    )
    whole: Tensor = parts.transpose(0, 1).reshape(1, count // ranks, ranks * length, dimension)
    return whole


def all_heads(tokens: Tensor, group: Any) -> Tensor:
    """Exchange ``[1, N, H / ranks, D]``, all tokens of this rank's heads, for ``[1, n, H, D]``."""
    ranks = dist.get_world_size(group)
    _, length, count, dimension = tokens.shape
    parts: Any = _AllToAll.apply(  # type: ignore[no-untyped-call]
        tokens.reshape(ranks, length // ranks, count, dimension), group
    )
    whole: Tensor = parts.transpose(0, 1).reshape(1, length // ranks, ranks * count, dimension)
    return whole


def repeat_heads(heads: Tensor, ranks: int) -> Tensor:
    """Repeat key or value heads ``[1, H, n, D]`` as often as needed for ``ranks`` to divide their number."""
    times = ranks // math.gcd(heads.size(1), ranks)
    return heads if times == 1 else heads.repeat_interleave(times, dim=1)


def sum_over(values: Tensor, group: Any) -> Tensor:
    """Return the sum of the ranks' ``values``; the gradient of the sum is passed to each rank without another sum."""
    total: Any = _SumOver.apply(values, group)  # type: ignore[no-untyped-call]
    result: Tensor = total
    return result
