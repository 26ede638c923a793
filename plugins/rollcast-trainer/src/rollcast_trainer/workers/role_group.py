"""Calls to the workers of a role; rows are balanced over the ranks, and every call is metered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from rollcast import WorkerGroup
from rollcast.protocol import DataProto, DataProtoFuture, Jagged
from rollcast_dispatch import ROW_TOKENS
from rollcast_trainer.batch.balance import row_lengths
from rollcast_trainer.batch.mini_batches import UpdatePlan, plan_update
from rollcast_trainer.workers.meter import Meter
from rollcast_trainer.workers.roles import mesh_of

__all__ = ["RoleGroup", "Update"]

W = TypeVar("W")


@dataclass(frozen=True)
class Update:
    """An update in flight.

    Attributes:
        role: role whose model trains.
        method: method of the role's workers.
        call: call of this method.
    """

    role: str
    method: str
    call: DataProtoFuture

    def get(self) -> dict[str, float]:
        """Wait for the update and return its metrics."""
        return dict(self.call.get()[0])


@dataclass(frozen=True)
class RoleGroup:
    """The workers of a role and the settings of calls to them.

    Attributes:
        role: role whose model runs.
        host_role: role under which the workers were started.
        group: worker group of the role.
        meter: counter of each call.
        balances: True to spread rows so that all ranks have about as many tokens.
        max_tokens: length in tokens of the longest response that the run allows.
    """

    role: str
    host_role: str
    group: WorkerGroup
    meter: Meter
    balances: bool
    max_tokens: int

    @property
    def ranks(self) -> int:
        """Number of data-parallel ranks."""
        return max(place.dp_rank for place in self.group.mesh(mesh_of(self.host_role))) + 1

    def infer(
        self, method: Callable[[W, DataProto], DataProto], batch: DataProto, writes: Iterable[str] | None = None
    ) -> DataProto:
        """Start a method that returns one row for each row of ``batch``, and return its columns, which are remote.

        Args:
            method: function of the worker's class; its dispatch mode balances the rows if it is ``token_balanced``.
            batch: columns to send, among them ``prompts`` and ``response_mask``.
            writes: columns of the result; None for all, whose names are known when the call ends.
        """
        lengths, tokens = row_lengths(batch), int(Jagged.of(batch["response_mask"]).values.sum())
        self.meter.count_pass(self.role, self.host_role, method.__name__, lengths, tokens)
        weights = lengths if self.balances else [1] * len(lengths)
        sent = batch.with_columns({ROW_TOKENS: torch.tensor(weights, dtype=torch.int64)})
        return self.group.submit(method, sent).select(writes)

    def update(
        self,
        method: Callable[[W, DataProto, UpdatePlan], Any],
        batch: DataProto,
        mini_batches: Sequence[torch.Tensor],
        epochs: int = 1,
        skip_rows: torch.Tensor | None = None,
    ) -> Update:
        """Start optimizer steps, one per mini-batch and epoch, and return their metrics in flight.

        ``method`` is a function of the worker's class; the arguments after it are those of
        :func:`~rollcast_trainer.batch.mini_batches.plan_update`.
        """
        ranks, lengths = self.ranks, row_lengths(batch)
        balanced = lengths if self.balances and ranks > 1 else None
        arranged, plan = plan_update(batch, mini_batches, ranks, self.max_tokens, epochs, skip_rows, balanced)
        passed = torch.cat(list(mini_batches)).repeat(epochs)
        passed = passed if skip_rows is None else passed[~skip_rows[passed]]
        tokens = int(Jagged.of(batch["response_mask"]).sums()[passed].sum())
        rows = [lengths[row] for row in passed.tolist()]
        self.meter.count_pass(self.role, self.host_role, method.__name__, rows, tokens, "train")
        return Update(self.role, method.__name__, self.group.submit(method, arranged, plan))
