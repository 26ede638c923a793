"""Rollouts of several trajectories: rows that share a ``rollout_index`` (int64 ``[B]``) count as one rollout.

In a batch without that column each row is a rollout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from rollcast.protocol import DataProto, Jagged

__all__ = ["FINAL", "ROLLOUT", "JoinedRollouts", "rollouts_of"]

ROLLOUT: Final = "rollout_index"
"""Column ``[B]``: rollout of each row."""
FINAL: Final = "is_final"
"""Column ``[B]``, bool: True for the row with the last reply of its rollout."""


def rollouts_of(batch: DataProto) -> torch.Tensor | None:
    """Return the rollout of each row, int64 ``[B]`` from 0; None if each row is a rollout of its own."""
    if ROLLOUT not in batch:
        return None
    rollouts, place = batch[ROLLOUT].unique(return_inverse=True)
    return None if len(rollouts) == len(batch) else place


@dataclass(frozen=True)
class JoinedRollouts:
    """Rows of a batch arranged so that the rows of a rollout are consecutive, ordered by turn.

    Attributes:
        order: row indices in this order, int64 ``[B]``.
        positions: positions of the tokens in the batch's jagged values, in this order, int64 ``[N]``.
        offsets: start of each rollout's tokens and the end of the last, int64 ``[R + 1]``.
        final: row that represents each rollout in columns ``[B]``: the row with the last reply, int64 ``[R]``.
    """

    order: torch.Tensor
    positions: torch.Tensor
    offsets: torch.Tensor
    final: torch.Tensor

    @classmethod
    def of(
        cls, rollouts: torch.Tensor, mask: Jagged, turn_ids: Jagged | None, is_final: torch.Tensor | None
    ) -> JoinedRollouts:
        """Join the rows of each rollout.

        Args:
            rollouts: rollout of each row, int64 ``[B]``, values ``0 .. R - 1``, each at least once.
            mask: jagged response mask.
            turn_ids: turn of each token, jagged; None orders by row.
            is_final: bool ``[B]``, True for one row of each rollout; None selects the last row of each.
        """
        order = torch.arange(len(rollouts))
        if turn_ids is not None:
            # A row without trained tokens sorts before rows with some: it has no reply that could be the last.
            last = torch.full((len(rollouts),), -1, dtype=torch.int64)
            turns = torch.where(mask.values.bool(), turn_ids.values.long(), -1)
            order = last.scatter_reduce_(0, mask.rows, turns, "amax").argsort(stable=True)
        order = order[rollouts[order].argsort(stable=True)]
        ends = rollouts.bincount().cumsum(0)
        picked = mask.positions(order)
        offsets = torch.cat([picked.offsets[:1], picked.offsets[ends]])
        final = order[ends - 1]
        if is_final is not None:
            chosen = is_final.nonzero().flatten()
            final = final.index_copy(0, rollouts[chosen], chosen)
        return cls(order, picked.values, offsets, final)

    def join(self, column: torch.Tensor) -> torch.Tensor:
        """Return a column with one row per rollout: all tokens of a jagged column, the final row of any other."""
        if column.layout == torch.jagged:
            return Jagged(Jagged.of(column).values[self.positions], self.offsets).column()
        return column[self.final]

    def split(self, joined: Jagged, like: Jagged) -> Jagged:
        """Return the values of ``joined``, which has one row per rollout, in the row layout of ``like``."""
        values = torch.empty_like(joined.values)
        values[self.positions] = joined.values
        return like.with_values(values)
