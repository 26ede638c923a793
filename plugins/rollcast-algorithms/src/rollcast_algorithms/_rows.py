"""Sums over ragged rows and over groups, with few passes over memory."""

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
"""Constant added to a variance before the square root; verl's value."""


_LANES = 128
#: Number of elements processed at a time on a CPU, so that intermediate results stay in the cache. Smaller blocks
#: would be slower, because all threads wait for the slowest one at the end of each operation.
_BLOCK = 1 << 20


class Rows:
    """The inputs of outcome estimators, and the memory of their result.

    At large sizes, the time is spent on passes over memory, most of it on page faults of new memory. So rewards and
    mask are read once, in blocks of rows, and there is a single ``[B, T]`` tensor, which first is the mask in float32
    and then the result. Multiplying by this tensor is several times as fast as selecting with a bool mask, which is
    used only for values that are not finite.

    Attributes:
        scores: sum of each row's rewards under the mask, float64 ``[B]``. In float32, the mean of equal scores can
            differ from them in the last bit; divided by a standard deviation of the same size, this rounding error
            would become an advantage.

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
        """Return the number of tokens of each row, int64 ``[B]``; call it before :meth:`spread`."""
        # A row has fewer than 2^24 tokens, so float32 counts exactly.
        return self._mask.sum(-1).long()

    def spread(self, scores: Tensor) -> AdvantageOutputs:
        """Broadcast ``scores`` ``[B]`` over the tokens of their rows, float32; must be the last call on this object."""
        column = scores.float().unsqueeze(-1)
        if bool(column.isfinite().all()):
            spread = self._mask.mul_(column)
        else:
            spread = torch.where(self._mask != 0, column, 0.0)
        return AdvantageOutputs(spread, spread)


def _by_blocks(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Apply ``function`` to blocks of rows of the tensors ``[B, T]``; concatenate its results ``[rows]`` to ``[B]``."""
    rows, width = tensors[0].shape
    size = max(_BLOCK // max(width, 1), 1) if tensors[0].device.type == "cpu" else max(rows, 1)
    starts = range(0, max(rows, 1), size)
    return torch.cat([function(*(tensor[start : start + size] for tensor in tensors)) for start in starts])


def _masked_sums(rewards: Tensor, mask: Tensor, copy: Tensor) -> Tensor:
    """Return the sums of the rows under the mask, float64 ``[B]``; write the mask to ``copy``, float32."""
    copy.copy_(mask)
    sums = _row_sums(widen(rewards) * copy)
    if not bool(sums.isfinite().all()):  # 0 · NaN is NaN
        sums = _row_sums(torch.where(mask != 0, widen(rewards), 0.0))
    return sums


def _row_sums(values: Tensor) -> Tensor:
    """Return the sums of the rows, float64 ``[B]``.

    torch would first copy all ``values`` to float64. Instead, every 128th column is summed in float32, which is exact
    for the few rewards that a row usually has, and only these partial sums are summed in float64.
    """
    width = values.shape[-1] // _LANES * _LANES
    total = values[:, width:].sum(-1, dtype=torch.float64)
    if width:
        lanes = torch.unflatten(values[:, :width], -1, (-1, _LANES)).sum(1)
        total = total + lanes.sum(-1, dtype=torch.float64)
    return total


def suffix_sums(terms: Tensor) -> Tensor:
    """Compute ``y_t = x_t + y_{t+1}`` along the last axis."""
    return terms.flip(-1).cumsum(-1).flip(-1)


def discounted_suffix_sums(terms: Tensor, factors: Tensor) -> Tensor:
    """Compute ``y_t = x_t + f_t · y_{t+1}`` along the last axis of ``[B, T]``, in log2(T) steps.

    After the step with stride k, each ``y_t`` is the sum of its first 2k terms, and each ``f_t`` is the product of the
    corresponding factors.
    """
    sums, stride = terms, 1
    while stride < terms.shape[-1]:
        sums = sums + factors * pad(sums[:, stride:], (0, stride))
        factors = factors * pad(factors[:, stride:], (0, stride))
        stride *= 2
    return sums


def whiten(values: Tensor, chosen: Tensor) -> Tensor:
    """Normalise to mean 0 and sample variance 1 over ``chosen``; 0 elsewhere, and for a single token."""
    count = chosen.sum()
    mean = values.sum() / count.clamp(min=1)
    centred = torch.where(chosen, values - mean, 0.0)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    return centred * _scale(variance)


def whiten_rows(scores: Tensor, lengths: Tensor) -> Tensor:
    """Whiten the scores ``[B]`` over tokens that all have their row's score, as :func:`whiten` would."""
    count = lengths.sum()
    centred = scores - (scores * lengths).sum() / count.clamp(min=1)
    variance = (centred.square() * lengths).sum() / (count - 1).clamp(min=1)
    return centred * _scale(variance) * (count > 1)


def _scale(variance: Tensor) -> Tensor:
    """Return ``1 / sqrt(variance + 1e-8)``."""
    return torch.rsqrt(variance + WHITEN_EPSILON)
