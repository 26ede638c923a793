"""The AgentLoopManager: it runs rollouts for prompts on the workers of a run, and assembles a batch."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rollcast import WorkerGroup
from rollcast.contracts.rollout import SamplingParams
from rollcast.errors import RolloutError
from rollcast.protocol import DataProto, Jagged
from rollcast_agents.assembly import assemble_trajectories
from rollcast_agents.contracts.trajectory import Segment, Trajectory

__all__ = ["AgentLoopManager", "Rollouts", "has_failed", "rows_of"]

logger = logging.getLogger(__name__)
_TASK = ("ground_truth", "data_source", "extra_info")
#: Columns of the prompts that the rollouts replace.
_REPLACED = ("prompts", "seed")


@dataclass(frozen=True, eq=False)
class Rollouts:
    """Result of a batch of prompts.

    Attributes:
        batch: one row per trajectory, those of one prompt row adjacent, with the prompts' columns.
        trajectories: trajectory of each row.
        sources: prompt row of each row.
    """

    batch: DataProto
    trajectories: Sequence[Trajectory]
    sources: Sequence[int]


def has_failed(trajectory: Trajectory) -> bool:
    """Return True if the trajectory's rollout must not be trained on."""
    failed = trajectory.failure is not None and trajectory.failure.boundary != "reward"
    return failed or trajectory.end in ("error", "timeout", "aborted")


def scoring_columns(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Return the columns of the trajectories' rows that the scorer reads besides those of their tokens."""
    return {
        "messages": [list(trajectory.messages) for trajectory in trajectories],
        "reward_components": [dict(trajectory.reward_components) for trajectory in trajectories],
        "reward_error": [
            trajectory.failure.message
            if trajectory.failure is not None and trajectory.failure.boundary == "reward"
            else ""
            for trajectory in trajectories
        ],
        "rollout_failed": torch.tensor([has_failed(trajectory) for trajectory in trajectories], dtype=torch.bool),
    }


class AgentLoopManager:
    """A manager that runs rollouts of prompts on the AgentLoopWorkers of a run.

    Args:
        group: worker group.
        addresses: restarts dead replicas and returns those to sample from; None if the workers sample in the actor's
            processes.
    """

    def __init__(self, group: WorkerGroup, addresses: Callable[[], Sequence[Any]] | None = None) -> None:
        self._group, self._addresses = group, addresses

    def roll_out(
        self, prompts: DataProto, seeds: torch.Tensor, sampling: SamplingParams, name: str, seed: int
    ) -> Rollouts:
        """Run a rollout for each row of prompts.

        Args:
            prompts: columns of a dataset's batch; rows with the same ``uid`` form a group; without ``uid`` each row is
                a group.
            seeds: seeds of the rollouts, int64 ``[B]``.
            sampling: default sampling parameters of a reply.
            name: prefix of the ids of these rollouts.
            seed: seed of the run, from which the seeds of tasks are derived.

        Raises:
            WorkerError: a worker was lost, or the agents cannot be built.
            RolloutError: no replica is left.
        """
        rows = rows_of(prompts, seeds, name, seed)
        if self._addresses is None:
            return _assembled(prompts, self._run(rows, sampling))
        addresses = list(self._addresses())
        lists = self._run(rows, sampling, addresses)
        while failed := [row for row, of_row in enumerate(lists) if any(map(_is_failed_by_engine, of_row))]:
            before, addresses = addresses, list(self._addresses())
            if addresses == before:  # no replica was lost
                break
            logger.warning("%d rollouts run again, since their replica was restarted", len(failed))
            again = self._run(rows.select_idxs(torch.tensor(failed)), sampling, addresses)
            for row, trajectories_of_row in zip(failed, again, strict=True):
                lists[row] = trajectories_of_row
        return _assembled(prompts, lists)

    def _run(self, rows: DataProto, *arguments: Any) -> list[Sequence[Trajectory]]:
        rollouts = self._group.run_rollouts(_padded(rows, self._group.world_size), *arguments)
        return list(rollouts.non_tensor_batch["trajectories"])[: len(rows)]


def _is_failed_by_engine(trajectory: Trajectory) -> bool:
    return trajectory.failure is not None and trajectory.failure.boundary == "engine"


def _padded(rows: DataProto, ranks: int) -> DataProto:
    """Return the rows with padding (``filler``), which makes their number divisible by the ranks and is not run."""
    missing = -len(rows) % ranks
    if not missing:
        return rows
    fillers = rows.select_idxs(torch.zeros(missing, dtype=torch.int64))
    return DataProto.concat([rows, fillers.with_columns({"filler": torch.ones(missing, dtype=torch.bool)})])


def rows_of(prompts: DataProto, seeds: torch.Tensor, name: str, seed: int) -> DataProto:
    """Return the rows to send to workers.

    Returns:
        ``seed`` int64 and ``filler`` bool ``[B]``, False, and the objects ``task``, ``rollout_id``, ``group_id``.
    """
    count = len(prompts)
    groups = prompts["uid"].tolist() if "uid" in prompts else list(range(count))
    seen: Counter[int] = Counter()
    rollout_ids = []
    for group in groups:
        rollout_ids.append(f"{name}/{group}.{seen[group]}")
        seen[group] += 1
    columns = {
        "task": _tasks(prompts, seed),
        "rollout_id": rollout_ids,
        "group_id": [f"{name}/{group}" for group in groups],
    }
    return DataProto.from_dict({"seed": seeds, "filler": torch.zeros(count, dtype=torch.bool)}, columns)


def _tasks(prompts: DataProto, seed: int) -> list[dict[str, Any]]:
    """Return each row's task for a loop: the dataset's columns, ``prompt`` as messages, and a ``seed`` by default."""
    columns = prompts.non_tensor_batch
    numbers = prompts["index"].tolist() if "index" in prompts else list(range(len(prompts)))
    tasks = []
    for row, number in enumerate(numbers):
        extra = columns["extra_info"][row] if "extra_info" in columns else None
        prompt = columns["raw_prompt"][row]
        known = {key: columns[key][row] for key in _TASK if key in columns}
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or ())
        # Rollouts of one prompt start the same episode, in every epoch and after a restart.
        drawn = int(np.random.SeedSequence([seed % 2**32, number]).generate_state(1)[0])
        tasks.append({"seed": drawn, "index": number, **(extra or {}), **known, "prompt": messages})
    return tasks


def _assembled(prompts: DataProto, lists: Sequence[Sequence[Trajectory]]) -> Rollouts:
    sources = [row for row, trajectories_of_row in enumerate(lists) for _ in trajectories_of_row]
    trajectories = [one for trajectories_of_row in lists for one in trajectories_of_row]
    context = Jagged.of(prompts["prompts"], "prompts")
    bounds = context.offsets.tolist()
    for place, (row, trajectory) in enumerate(zip(sources, trajectories, strict=True)):
        if not trajectory.segments:
            # Nothing was sampled or even rendered; use the prompt, because an empty row could not be decoded.
            ids = context.values[bounds[row] : bounds[row + 1]].to(torch.int32).numpy()
            trajectories[place] = replace(trajectory, segments=(Segment(ids, sampled=False, turn=0),))
    rows = assemble_trajectories(trajectories).with_columns(scoring_columns(trajectories))
    rest = prompts.drop([name for name in _REPLACED if name in prompts])
    return Rollouts(rest.select_idxs(torch.tensor(sources, dtype=torch.int64)).joined(rows), trajectories, sources)


def refuse_if_empty(rollouts: Rollouts, step: int) -> None:
    """Check that at least one rollout of a step can be trained on.

    Raises:
        RolloutError: none can; the message counts the failures by boundary, and quotes the first.
    """
    if any(trajectory.sampled_tokens and not has_failed(trajectory) for trajectory in rollouts.trajectories):
        return
    whole = list({trajectory.rollout_id: trajectory for trajectory in rollouts.trajectories}.values())
    failures = [trajectory.failure for trajectory in whole if trajectory.failure is not None]
    counts = [f"{count} in the {name}" for name, count in Counter(failure.boundary for failure in failures).items()]
    ends = Counter(trajectory.end for trajectory in whole if trajectory.failure is None)
    said = ", ".join([*counts, *(f"{count} ended with {end} before a reply" for end, count in ends.items())])
    first = f"; the first: {failures[0].message}" if failures else ""
    raise RolloutError(f"all {len(whole)} rollouts of step {step} failed: {said}{first}")
