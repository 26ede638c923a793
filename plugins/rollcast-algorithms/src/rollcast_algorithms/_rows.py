"""Sums over ragged rows and over groups, with few passes over the memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollcast.contracts.algorithm import AdvantageInputs
from rollcast.protocol.memory import empty

__all__ = ["WHITEN_EPSILON", "Rows", "discounted_suffix_sums", "read_rows", "suffix_sums", "whiten", "whiten_rows"]

WHITEN_EPSILON = 1e-8
"""Added to a variance before its root is divided by; verl's value."""

# Elements a block on a CPU: small enough for its temporaries to stay in the cache, and large enough for few
# parallel regions, of which each has to wait for all threads.
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Rows:
    """What outcome estimators read of a batch.

    Attributes:
        scores: float64 ``[B]``, the sum of each row's rewards under the mask.
        chosen: bool ``[B, T]``.
    """

    scores: Tensor
    chosen: Tensor

    def lengths(self) -> Tensor:
        """Tokens of each row, int64 ``[B]``."""
        if self.chosen.numel() == 0:
            return self.chosen.sum(-1)
        # Summing bools is ten times slower than summing what they are cast to, while that is in the cache.
        step = _block_rows(self.chosen)
        blocks = [self.chosen[start : start + step] for start in range(0, len(self.chosen), step)]
        return torch.cat([block.long().sum(-1) for block in blocks])


def read_rows(inputs: AdvantageInputs) -> Rows:
    """Read rewards and mask once.

    The sums are float64: in float32 the mean of equal scores can differ from them in the last bit,
    and divided by a standard deviation of that same bit, rounding would turn into an advantage.

    Raises:
        ValueError: the shapes do not fit together.
    """
    rewards, mask = inputs.token_level_rewards, inputs.response_mask
    if rewards.shape != mask.shape:
        raise ValueError(f"token_level_rewards is {list(rewards.shape)}, but the mask is {list(mask.shape)}")
    if inputs.group_ids.shape != mask.shape[:1]:
        raise ValueError(f"group_ids is {list(inputs.group_ids.shape)}, but there are {len(mask)} rows")
    step = _block_rows(mask)
    scores = torch.empty(len(mask), dtype=torch.float64, device=mask.device)
    chosen = empty(mask.shape, torch.bool, mask.device)
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    room = torch.empty(min(step, len(mask)), mask.shape[1], dtype=dtype, device=mask.device)
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    for start in range(0, len(mask), step):
        block = slice(start, start + step)
        torch.ne(mask[block], 0, out=chosen[block])
        inside = room[: len(chosen[block])]
        torch.where(chosen[block], rewards[block].detach().to(dtype), zero, out=inside)
        torch.sum(inside, -1, dtype=torch.float64, out=scores[block])
    return Rows(scores, chosen)


def _block_rows(tensor: Tensor) -> int:
    """Rows of ``[B, T]`` to work on at once."""
    count, width = tensor.shape
    return max(1, _BLOCK // max(width, 1)) if tensor.device.type == "cpu" else max(count, 1)


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
