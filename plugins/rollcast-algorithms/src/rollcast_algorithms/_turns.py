"""Turns of a batch of rollouts, which are runs of the policy's own tokens with one turn id."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Turns"]


class Turns:
    """The turns of padded rows, numbered across the batch in the order of rows and tokens.

    A turn is a maximal run of tokens under the mask with one turn id; tokens under a zero between them (a tool's
    answer within the turn) do not end it. Axes: ``N`` turns, ``K`` turns of the longest row.

    Attributes:
        rows: row index of each turn, int64 ``[N]``.
        places: index of each turn within its row, int64 ``[N]``.
        longest: largest number of turns in a row, ``K``.

    Args:
        chosen: mask of the policy's tokens, bool ``[B, T]``.
        turn_ids: turn id of each token, integers ``[B, T]``.

    Raises:
        ValueError: the shapes differ.
    """

    def __init__(self, chosen: Tensor, turn_ids: Tensor) -> None:
        if turn_ids.shape != chosen.shape:
            raise ValueError(f"turn_ids is {list(turn_ids.shape)}, but the mask is {list(chosen.shape)}")
        self._chosen = chosen
        rows = chosen.nonzero()[:, 0]
        ids = turn_ids[chosen]
        starts = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        starts[1:] = (rows[1:] != rows[:-1]) | (ids[1:] != ids[:-1])
        self._starts = starts.nonzero().flatten()
        self._turn_of_token = starts.long().cumsum(0) - 1
        self.rows = rows[self._starts]
        counts = self.rows.bincount(minlength=len(chosen))
        self.longest = int(counts.max()) if len(counts) else 0
        before = counts.cumsum(0) - counts
        self.places = torch.arange(len(self.rows), device=rows.device) - before[self.rows]

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` ``[B, T]`` over each turn's tokens, float64 ``[N]``."""
        own = values[self._chosen].double()
        return own.new_zeros(len(self.rows)).index_add_(0, self._turn_of_token, own)

    def firsts(self, values: Tensor) -> Tensor:
        """Return the value at each turn's first token, ``[N]``."""
        return values[self._chosen][self._starts]

    def pad(self, values: Tensor) -> Tensor:
        """Pad ``values`` ``[N]`` to ``[B, K]``, zero after each row's last turn."""
        padded = values.new_zeros(len(self._chosen), self.longest)
        padded[self.rows, self.places] = values
        return padded

    def unpad(self, padded: Tensor) -> Tensor:
        """Return the turns of ``padded`` ``[B, K]``, ``[N]``."""
        return padded[self.rows, self.places]

    def spread(self, values: Tensor) -> Tensor:
        """Broadcast ``values`` ``[N]`` over the tokens of their turns, float32 ``[B, T]``, zero elsewhere."""
        spread = torch.zeros(self._chosen.shape, dtype=torch.float32, device=values.device)
        spread[self._chosen] = values.float()[self._turn_of_token]
        return spread
