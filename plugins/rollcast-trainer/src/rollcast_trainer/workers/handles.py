"""Typed calls to the workers of a role; rows are balanced over the ranks, and every call is metered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from rollcast import WorkerGroup
from rollcast.contracts.rollout import MULTI_MODAL_DATA, ROUTED_EXPERTS
from rollcast.errors import CapabilityError
from rollcast.protocol import DataProto, DataProtoFuture, Jagged, LazyBatch
from rollcast_trainer.batch.balance import row_lengths, spread_rows
from rollcast_trainer.batch.columns import MODEL, POLICY_GAP, model_columns
from rollcast_trainer.batch.mini_batches import UpdatePlan, plan_update
from rollcast_trainer.batch.rollouts import ROLLOUT
from rollcast_trainer.workers.meter import Meter
from rollcast_trainer.workers.roles import mesh_of

__all__ = ["ActorHandle", "CriticHandle", "Playing", "ReferenceHandle", "RewardModelHandle", "RoleHandle", "Update"]

#: Function that starts a method of a group.
Call = Callable[[DataProtoFuture], DataProtoFuture]


@dataclass(frozen=True)
class Playing:
    """The workers of a role and the settings of calls to them.

    Attributes:
        role: role whose model runs.
        played_as: role under which the workers were started.
        group: worker group of the role.
        meter: counter of each call.
        balances: True to spread rows so that all ranks have about as many tokens.
        max_tokens: length in tokens of the longest response that the run allows.
    """

    role: str
    played_as: str
    group: WorkerGroup
    meter: Meter
    balances: bool
    max_tokens: int

    @property
    def ranks(self) -> int:
        """Number of data-parallel ranks."""
        return max(place.dp_rank for place in self.group.mesh(mesh_of(self.played_as))) + 1


@dataclass(frozen=True)
class Update:
    """Handle to an update in flight.

    Attributes:
        role: role whose model trains.
        method: method of the role's workers.
        call: handle to the call of this method.
    """

    role: str
    method: str
    call: DataProtoFuture

    def get(self) -> dict[str, float]:
        """Wait for the update and return its metrics."""
        return dict(self.call.get()[0])


class RoleHandle:
    """Handle to the workers of any role."""

    def __init__(self, playing: Playing) -> None:
        self.playing = playing
        self.group = playing.group

    def infer(self, method: str, call: Call, batch: DataProto, writes: Iterable[str] | None = None) -> LazyBatch:
        """Start a call that returns one row for each row of ``batch``, and return its columns lazily.

        Args:
            method: name of the call, for the meter.
            call: starts the method of the group and returns a handle.
            batch: columns to send, among them ``prompts`` and ``response_mask``.
            writes: columns of the result; None waits for the end of the call to know them.
        """
        playing = self.playing
        lengths, tokens = row_lengths(batch), int(Jagged.of(batch["response_mask"]).values.sum())
        playing.meter.count_pass(playing.role, playing.played_as, method, lengths, tokens)
        ranks = playing.ranks if playing.balances else 1
        return LazyBatch.of(spread_rows(call, DataProtoFuture.of_batch(batch), lengths, ranks), writes)

    def update(
        self,
        method: str,
        call: Callable[[DataProtoFuture, UpdatePlan], DataProtoFuture],
        batch: DataProto,
        mini_batches: Sequence[torch.Tensor],
        epochs: int = 1,
        skip_rows: torch.Tensor | None = None,
    ) -> Update:
        """Start optimizer steps, one per mini-batch and epoch, and return a handle to their metrics.

        ``call`` starts the method of the group; the arguments after it are those of
        :func:`~rollcast_trainer.batch.mini_batches.plan_update`.
        """
        playing, ranks = self.playing, self.playing.ranks
        lengths = row_lengths(batch)
        balanced = lengths if playing.balances and ranks > 1 else None
        arranged, plan = plan_update(batch, mini_batches, ranks, playing.max_tokens, epochs, skip_rows, balanced)
        passed = torch.cat(list(mini_batches)).repeat(epochs)
        passed = passed if skip_rows is None else passed[~skip_rows[passed]]
        tokens = int(Jagged.of(batch["response_mask"]).sums()[passed].sum())
        rows = [lengths[row] for row in passed.tolist()]
        playing.meter.count_pass(playing.role, playing.played_as, method, rows, tokens, "train")
        return Update(playing.role, method, call(DataProtoFuture.of_batch(arranged), plan))


class ActorHandle(RoleHandle):
    """Handle to the policy in training."""

    def compute_log_prob(self, batch: DataProto, writes: Iterable[str] = ("old_log_probs",)) -> LazyBatch:
        """Return ``old_log_probs``, jagged float32, and further columns that the setup asks for.

        If the batch has ``rollout_log_probs``, the columns ``POLICY_GAP`` (float32 ``[B]``) are returned too; they hold
        the per-row sums that the metrics need. If it has ``routed_experts``, the pass replays them.
        """
        given = [name for name in ("rollout_log_probs", ROUTED_EXPERTS) if name in batch]
        return self.infer(
            "compute_log_prob",
            self.group.compute_log_prob.remote,
            batch.select([*model_columns(batch), *given]),
            [*writes, *(POLICY_GAP if "rollout_log_probs" in given else ())],
        )

    def update_actor(
        self,
        batch: DataProto,
        mini_batches: Sequence[torch.Tensor],
        epochs: int = 1,
        skip_rows: torch.Tensor | None = None,
    ) -> Update:
        """Start optimizer steps of the policy; see :meth:`RoleHandle.update`."""
        self.playing.meter.count_tokens(sum(row_lengths(batch)))
        return self.update("update_actor", self.group.update_actor.remote, batch, mini_batches, epochs, skip_rows)


def _refuse_images(batch: DataProto, what: str) -> None:
    """Check that a batch has no images.

    Raises:
        CapabilityError: it has.
    """
    if MULTI_MODAL_DATA in batch:
        raise CapabilityError(
            f"the prompts have images (column {MULTI_MODAL_DATA}), which {what} does not see; use an estimator "
            "without a critic, such as grpo, and a reward function"
        )


class ReferenceHandle(RoleHandle):
    """Handle to the frozen initial policy."""

    def compute_ref_log_prob(self, batch: DataProto) -> LazyBatch:
        """Return ``ref_log_prob``, jagged float32."""
        call = self.group.compute_ref_log_prob.remote
        return self.infer("compute_ref_log_prob", call, batch.select(model_columns(batch)), ["ref_log_prob"])


class CriticHandle(RoleHandle):
    """Handle to the value model."""

    def compute_values(self, batch: DataProto) -> LazyBatch:
        """Return ``values``, jagged float32."""
        _refuse_images(batch, "a critic")
        return self.infer("compute_values", self.group.compute_values.remote, batch.select(MODEL), ["values"])

    def update_critic(self, batch: DataProto, mini_batches: Sequence[torch.Tensor], epochs: int = 1) -> Update:
        """Start optimizer steps of the value model; see :meth:`RoleHandle.update`."""
        columns = batch.select([*MODEL, "values", "returns", *(name for name in (ROLLOUT,) if name in batch)])
        return self.update("update_critic", self.group.update_critic.remote, columns, mini_batches, epochs)


class RewardModelHandle(RoleHandle):
    """Handle to the model that scores responses."""

    def compute_rm_score(self, batch: DataProto) -> LazyBatch:
        """Return ``rm_scores``, float32 ``[B]``."""
        _refuse_images(batch, "a reward model")
        return self.infer("compute_rm_score", self.group.compute_rm_score.remote, batch.select(MODEL), ["rm_scores"])
