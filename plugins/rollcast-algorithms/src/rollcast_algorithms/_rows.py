"""Sums over ragged rows and over groups, with few passes over the memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollcast.contracts.algorithm import AdvantageInputs, AdvantageOutputs
from rollcast.protocol import empty_tensor
from rollcast_algorithms._masking import widen

__all__ = ["WHITEN_EPSILON", "Rows", "discounted_suffix_sums", "suffix_sums", "whiten", "whiten_rows"]

WHITEN_EPSILON = 1e-8
"""Added to a variance before its root is divided by; verl's value."""


_LANES = 128
#: Elements that are worked on at a time on a CPU, so that intermediate results stay in the cache. Not
#: fewer: at the end of each operation all threads wait for the last, which takes long where others are busy.
_BLOCK = 1 << 20


class Rows:
    """What outcome estimators read of a batch, and the memory of their result.

    At large sizes all time goes into passes over the memory, above all into the first touch of fresh memory.
    So rewards and mask are read once, in blocks of rows, and there is one ``[B, T]`` tensor: first the mask in
    float32, then the result. Products with it are several times as fast as selections by a bool mask, which
    are left to values that are not finite.

    Attributes:
        scores: float64 ``[B]``, the sum of each row's rewards under the mask. In float32 the mean of equal
            scores can differ from them in the last bit, and divided by a standard deviation of that same
            bit, rounding would turn into an advantage.

    Raises:
        ValueError: the shapes do not fit together.
    """

    def __init__(self, inputs: AdvantageInputs) -> None:
        rewards, mask = inputs.token_level_rewards.detach(), inputs.response_mask
        if rewards.shape != mask.shape:
            raise ValueError(f"token_level_rewards is {list(rewards.shape)}, but the mask is {list(mask.shape)}")
        if inputs.group_ids.shape != mask.shape[:1]:
            raise ValueError(f"group_ids is {list(inputs.group_ids.shape)}, but there are {len(mask)} rows")
        self._mask = empty_tensor(mask.shape, torch.float32, mask.device)
        self.scores = _by_blocks(_masked_sums, rewards, mask, self._mask)

    def lengths(self) -> Tensor:
        """Tokens of each row, int64 ``[B]``; to be called before :meth:`spread`."""
        # A row has fewer than 2^24 tokens, so float32 counts exactly.
        return self._mask.sum(-1).long()

    def spread(self, scores: Tensor) -> AdvantageOutputs:
        """``scores`` ``[B]`` at each of their row's tokens, float32; the last that is done with these rows."""
        column = scores.float().unsqueeze(-1)
        if bool(column.isfinite().all()):
            spread = self._mask.mul_(column)
        else:
            spread = torch.where(self._mask != 0, column, 0.0)
        return AdvantageOutputs(spread, spread)


def _by_blocks(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """``function`` of blocks of rows of the tensors ``[B, T]``, its results ``[rows]`` joined to ``[B]``."""
    rows, width = tensors[0].shape
    size = max(_BLOCK // max(width, 1), 1) if tensors[0].device.type == "cpu" else max(rows, 1)
    starts = range(0, max(rows, 1), size)
    return torch.cat([function(*(tensor[start : start + size] for tensor in tensors)) for start in starts])


def _masked_sums(rewards: Tensor, mask: Tensor, copy: Tensor) -> Tensor:
    """Sums of the rows under the mask, float64 ``[B]``; the mask is copied to ``copy``, float32."""
    copy.copy_(mask)
    sums = _row_sums(widen(rewards) * copy)
    if not bool(sums.isfinite().all()):  # 0 · NaN is NaN
        sums = _row_sums(torch.where(mask != 0, widen(rewards), 0.0))
    return sums


def _row_sums(values: Tensor) -> Tensor:
    """Sums of the rows, float64 ``[B]``.

    torch would first copy all of ``values`` to float64. So every 128th column is added up in float32, which
    is exact for the few rewards that a row usually has, and only these sums in float64.
    """
    width = values.shape[-1] // _LANES * _LANES
    total = values[:, width:].sum(-1, dtype=torch.float64)
    if width:
        lanes = torch.unflatten(values[:, :width], -1, (-1, _LANES)).sum(1)
        total = total + lanes.sum(-1, dtype=torch.float64)
    return total


def suffix_sums(terms: Tensor) -> Tensor:
    """``y_t = x_t + y_{t+1}`` along the last axis."""
    return terms.flip(-1).cumsum(-1).flip(-1)


def discounted_suffix_sums(terms: Tensor, factors: Tensor) -> Tensor:
    """``y_t = x_t + f_t · y_{t+1}`` along the last axis of ``[B, T]``, in log2(T) steps.

    After the step of stride k each ``y_t`` holds its first 2k terms, and each ``f_t`` the product of
    the factors up to there.
    """
    sums, stride = terms, 1
    while stride < terms.shape[-1]:
        sums = sums + factors * pad(sums[:, stride:], (0, stride))
        factors = factors * pad(factors[:, stride:], (0, stride))
        stride *= 2
    return sums


def whiten(values: Tensor, chosen: Tensor) -> Tensor:
    """Mean 0 and sample variance 1 over ``chosen``; 0 elsewhere, and for a single token."""
    count = chosen.sum()
    mean = values.sum() / count.clamp(min=1)
    centred = torch.where(chosen, values - mean, 0.0)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    return centred * _scale(variance)


def whiten_rows(scores: Tensor, lengths: Tensor) -> Tensor:
    """:func:`whiten` over tokens that all have their row's score: ``[B]``, without touching the tokens."""
    count = lengths.sum()
    centred = scores - (scores * lengths).sum() / count.clamp(min=1)
    variance = (centred.square() * lengths).sum() / (count - 1).clamp(min=1)
    return centred * _scale(variance) * (count > 1)


def _scale(variance: Tensor) -> Tensor:
    """``1 / sqrt(variance + 1e-8)``."""
    return torch.rsqrt(variance + WHITEN_EPSILON)
