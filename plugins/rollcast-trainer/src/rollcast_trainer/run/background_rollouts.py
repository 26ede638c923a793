"""Asynchronous rollouts: groups that start ahead of the step that trains on them (``trainer.max_staleness``)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from rollcast.contracts.rollout import RolloutMode
from rollcast.errors import CapabilityError
from rollcast.protocol import DataProto, Jagged
from rollcast_serving.contracts.admission import AdmissionSettings, BaseAdmission, admissions
from rollcast_serving.replicas import Replicas
from rollcast_serving.sampler import ReplicaSampler
from rollcast_serving.service import RolloutService, TakenGroup
from rollcast_trainer.run.run import Run
from rollcast_trainer.run.settings import RunSettings

__all__ = [
    "PromptGroup",
    "BackgroundRollouts",
    "age_metrics",
    "numbered",
    "refuse_without_replicas",
    "replicas_of",
]

R = TypeVar("R")


def refuse_without_replicas(settings: RunSettings) -> None:
    """Check that asynchronous rollouts have an engine of their own.

    Raises:
        CapabilityError: they do not; the message names the keys.
    """
    rollout = settings.rollout
    if settings.max_staleness and (not settings.uses_replicas or rollout.mode == RolloutMode.HYBRID.value):
        raise CapabilityError(
            f"trainer.max_staleness={settings.max_staleness} generates while the actor trains, but with "
            f"rollout.mode={rollout.mode} and rollout.weight_sync={rollout.weight_sync} generation and training take "
            "turns; choose rollout.mode=standalone with a pool of its own, or colocated, and a weight sync that sends "
            "to replicas, such as shared_memory"
        )


def replicas_of(run: Run) -> Replicas:
    """Return the replicas of a run.

    Raises:
        CapabilityError: the run generates in the actor's processes.
    """
    if not isinstance(run.sampler, ReplicaSampler):
        raise CapabilityError(
            f"trainer.max_staleness={run.settings.max_staleness} needs replicas, and this run has none"
        )
    return run.sampler.replicas


@dataclass(frozen=True)
class PromptGroup:
    """One prompt and the seeds of its rollouts.

    Attributes:
        number: index of the prompt in the run, from 0.
        rows: the prompt's row repeated ``rollout.n`` times, with ``uid`` 0.
        seeds: seeds of the rollouts, int64 ``[n]``.
    """

    number: int
    rows: DataProto
    seeds: torch.Tensor


class BackgroundRollouts(Generic[R]):
    """Asynchronous rollouts of a stage: prompts are drawn ahead, and each step receives its finished groups.

    A checkpoint stores the numbers of the trained groups. After a restart the other groups are generated again from the
    same prompts, so that none is lost or trained twice.

    Args:
        run: run of the stage.
        roll_out: runs the rollouts of a group in the event loop of the replicas, and scores them.
    """

    def __init__(self, run: Run, roll_out: Callable[[PromptGroup], Awaitable[R]]) -> None:
        self._run, self._roll_out = run, roll_out
        run.on_synced.append(self.publish)
        self._size = int(run.settings.data.train_batch_size)
        settings = AdmissionSettings(run.settings.max_staleness, self._size)
        self.admission: BaseAdmission = admissions.get(run.settings.trainer.admission)(settings)
        self._service: RolloutService[PromptGroup, R] | None = None
        self._version = 0
        #: Batches with untrained groups, by number: the data position before the batch, and the numbers of its groups
        #: that no step has taken.
        self._open: dict[int, tuple[Mapping[str, Any], set[int]]] = {}
        self._batches = 0
        #: Trained groups of batches that are read again after a restart.
        self._trained: set[int] = set()

    def take(self) -> list[TakenGroup[PromptGroup, R]]:
        """Return the groups of this step; block until there are enough."""
        replicas = replicas_of(self._run)
        service = self._service
        if service is None:
            service = self._service = RolloutService(self.admission, self._roll_out, self._version)
            replicas.on_close.append(service.close)
        while self._is_short(service):
            replicas.run(service.submit(self._groups(self._run.prompts.draw())))
        taken_groups = replicas.run(service.take(self._size))
        for group in (*(taken_group.task for taken_group in taken_groups), *service.queue.take_dropped()):
            self._forget(group.number)
        load = service.queue.load
        self._run.record(
            {
                "rollout/groups_waiting": float(load.waiting),
                "rollout/groups_running": float(load.running),
                "rollout/groups_ready": float(load.ready),
                "rollout/groups_dropped": float(load.dropped),
                "rollout/idle_s": replicas.run(service.take_idle_seconds()),
            }
        )
        return taken_groups

    def publish(self, version: int) -> None:
        """Tell the service the current weight version of the replicas."""
        self._version = version
        if self._service is not None:
            replicas_of(self._run).run(self._service.publish(version))

    def _is_short(self, service: RolloutService[PromptGroup, R]) -> bool:
        """Return True if more groups may start than exist, and later steps need them."""
        ahead = (self._run.settings.max_staleness + 1) * self._size
        left = (self._run.total_steps - self._run.step + 1) * self._size
        return len(service.queue) < min(ahead, left)

    def _groups(self, prompts: DataProto) -> list[PromptGroup]:
        batch, self._batches = self._batches, self._batches + 1
        first, count = batch * self._size, int(self._run.settings.rollout.n)
        numbers = [first + row for row in range(len(prompts)) if first + row not in self._trained]
        self._trained -= set(range(first, first + len(prompts)))
        if numbers:
            self._open[batch] = (self._run.prompts.position, set(numbers))
        groups = []
        for number in numbers:
            row = prompts.select_idxs(torch.tensor([number - first])).with_columns({"uid": torch.zeros(1).long()})
            seeds = self._run.seeds.of(f"group {number}", count)
            groups.append(PromptGroup(number, row.repeat(count, interleave=True), seeds))
        return groups

    def _forget(self, number: int) -> None:
        batch = number // self._size
        numbers = self._open[batch][1]
        numbers.discard(number)
        if not numbers:
            del self._open[batch]

    # -- checkpoints --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the data position of the first untrained group and the trained groups after it, as JSON."""
        first = min(self._open, default=self._batches)
        untrained = {number for _, numbers in self._open.values() for number in numbers}
        drawn = range(first * self._size, self._batches * self._size)
        position = self._open[first][0] if self._open else None
        return {
            "first_batch": first,
            "position": None if position is None else dict(position),
            "trained": [number for number in drawn if number not in untrained],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the untrained groups, from their prompts."""
        self._batches, self._trained = int(state["first_batch"]), set(state["trained"])
        if state["position"] is not None:
            self._run.prompts.load_state_dict(state["position"])


def age_metrics(batch: DataProto, version: int) -> dict[str, float]:
    """Return metrics of the age of a step's tokens, in weight versions.

    Args:
        batch: ``rollout_weight_version`` and ``rollout_weight_version_min`` int64 ``[B]``, and ``response_mask``.
        version: weight version at the start of the step.

    Returns:
        Mean and maximum age, the share of tokens of each age, and the share of rows sampled from several versions. Each
        token counts with the age of the oldest token of its row; only masked tokens count.
    """
    tokens = Jagged.of(batch["response_mask"]).sums()
    sampled = (batch["rollout_weight_version_min"] >= 0) & (tokens > 0)
    oldest, newest = batch["rollout_weight_version_min"][sampled], batch["rollout_weight_version"][sampled]
    weights = tokens[sampled].double() / max(float(tokens[sampled].sum()), 1.0)
    ages = (version - oldest).clamp(min=0)
    shares = torch.zeros(int(ages.max()) + 1 if len(ages) else 1, dtype=torch.float64).index_add_(0, ages, weights)
    return {
        **{f"staleness/{age}": share for age, share in enumerate(shares.tolist())},
        "staleness/mean": float((ages * weights).sum()),
        "staleness/max": float(ages.max()) if len(ages) else 0.0,
        "staleness/mixed_rows": float((newest != oldest).float().mean()) if len(ages) else 0.0,
    }


def numbered(parts: Sequence[DataProto]) -> Iterator[DataProto]:
    """Yield the groups of a step with their index as ``uid``, and with ``rollout_index`` unique over all groups."""
    rollouts = 0
    for place, part in enumerate(parts):
        columns = {"uid": torch.full((len(part),), place)}
        if "rollout_index" in part:
            columns["rollout_index"] = part["rollout_index"] + rollouts
            rollouts += int(part["rollout_index"].max()) + 1 if len(part) else 0
        yield part.with_columns(columns)
