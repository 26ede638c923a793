"""Typed calls to the workers of a role: rows are balanced over the ranks, and every call is metered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rollcast import WorkerGroup
from rollcast.protocol import DataProto, Jagged
from rollcast_trainer.batch.balance import row_lengths, spread_rows
from rollcast_trainer.batch.columns import MODEL
from rollcast_trainer.batch.mini_batches import UpdatePlan, plan_update
from rollcast_trainer.batch.rollouts import ROLLOUT
from rollcast_trainer.workers.meter import Meter
from rollcast_trainer.workers.roles import mesh_of

__all__ = ["ActorHandle", "CriticHandle", "Playing", "ReferenceHandle", "RewardModelHandle", "RoleHandle"]


@dataclass(frozen=True)
class Playing:
    """The workers that play a role, and how they are called.

    Attributes:
        role: role whose model runs.
        played_as: role under which the workers were started.
        group: the workers.
        meter: counts each call.
        balances: spread rows so that all ranks have about as many tokens.
        max_tokens: the longest response that the run allows.
    """

    role: str
    played_as: str
    group: WorkerGroup
    meter: Meter
    balances: bool
    max_tokens: int

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return max(place.dp_rank for place in self.group.mesh(mesh_of(self.played_as))) + 1


class RoleHandle:
    """Workers of any role."""

    def __init__(self, playing: Playing) -> None:
        self.playing = playing
        self.group = playing.group

    def infer(self, method: str, call: Callable[[DataProto], DataProto], batch: DataProto) -> DataProto:
        """Return what ``call`` returns for each row of ``batch``, in order.

        Args:
            method: name of the call, for the meter.
            call: method of the group that returns a row for each row.
            batch: columns of a model's pass.
        """
        playing = self.playing
        lengths, tokens = row_lengths(batch), int(Jagged.of(batch["response_mask"]).values.sum())
        with playing.meter.measuring(playing.role, playing.played_as, method, lengths, tokens):
            return spread_rows(call, batch, playing.ranks if playing.balances else 1)

    def update(
        self,
        method: str,
        call: Callable[[DataProto, UpdatePlan], Sequence[dict[str, float]]],
        batch: DataProto,
        mini_batches: Sequence[torch.Tensor],
        epochs: int = 1,
        skip_rows: torch.Tensor | None = None,
    ) -> dict[str, float]:
        """Take optimizer steps, one a mini-batch and epoch, and return their metrics.

        The arguments after ``call`` are those of :func:`~rollcast_trainer.batch.mini_batches.plan_update`.
        """
        playing, ranks = self.playing, self.playing.ranks
        lengths = row_lengths(batch)
        balanced = lengths if playing.balances and ranks > 1 else None
        arranged, plan = plan_update(batch, mini_batches, ranks, playing.max_tokens, epochs, skip_rows, balanced)
        passed = torch.cat(list(mini_batches)).repeat(epochs)
        passed = passed if skip_rows is None else passed[~skip_rows[passed]]
        tokens = int(Jagged.of(batch["response_mask"]).sums()[passed].sum())
        rows = [lengths[row] for row in passed.tolist()]
        with playing.meter.measuring(playing.role, playing.played_as, method, rows, tokens, "train"):
            return dict(call(arranged, plan)[0])


class ActorHandle(RoleHandle):
    """The policy in training."""

    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """Return ``old_log_probs`` and what else the setup asks for, jagged float32."""
        return self.infer("compute_log_prob", self.group.compute_log_prob, batch.select(MODEL))

    def update_actor(
        self,
        batch: DataProto,
        mini_batches: Sequence[torch.Tensor],
        epochs: int = 1,
        skip_rows: torch.Tensor | None = None,
    ) -> dict[str, float]:
        """Take optimizer steps of the policy; see :meth:`RoleHandle.update`."""
        self.playing.meter.count_tokens(sum(row_lengths(batch)))
        return self.update("update_actor", self.group.update_actor, batch, mini_batches, epochs, skip_rows)


class ReferenceHandle(RoleHandle):
    """The frozen initial policy."""

    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Return ``ref_log_prob``, jagged float32."""
        return self.infer("compute_ref_log_prob", self.group.compute_ref_log_prob, batch.select(MODEL))


class CriticHandle(RoleHandle):
    """The value model."""

    def compute_values(self, batch: DataProto) -> DataProto:
        """Return ``values``, jagged float32."""
        return self.infer("compute_values", self.group.compute_values, batch.select(MODEL))

    def update_critic(
        self, batch: DataProto, mini_batches: Sequence[torch.Tensor], epochs: int = 1
    ) -> dict[str, float]:
        """Take optimizer steps of the value model; see :meth:`RoleHandle.update`."""
        columns = batch.select([*MODEL, "values", "returns", *(name for name in (ROLLOUT,) if name in batch)])
        return self.update("update_critic", self.group.update_critic, columns, mini_batches, epochs)


class RewardModelHandle(RoleHandle):
    """The model that scores responses."""

    def compute_rm_score(self, batch: DataProto) -> DataProto:
        """Return ``rm_scores``, float32 ``[B]``."""
        return self.infer("compute_rm_score", self.group.compute_rm_score, batch.select(MODEL))
