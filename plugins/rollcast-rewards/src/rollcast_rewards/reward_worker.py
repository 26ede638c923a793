"""Reward workers, processes in their own pool that decode and score rows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rollcast import Worker, WorkerGroup, register
from rollcast.contracts.reward import RewardResult
from rollcast.errors import RewardError, WorkerError
from rollcast.protocol import DataProto
from rollcast_data.tokenizer import load_tokenizer
from rollcast_rewards.scoring import RESULTS, RewardScorer, RewardSetup

__all__ = ["RewardWorker", "RewardWorkerSetup", "RewardWorkers"]

_FILLER = "filler"


@dataclass(frozen=True)
class RewardWorkerSetup:
    """Constructor arguments of a reward worker.

    Attributes:
        reward: reward and manager; each worker builds its own.
        model_path: folder of the policy's tokenizer.
        trust_remote_code: True to allow the folder's own Python code.
    """

    reward: RewardSetup
    model_path: str
    trust_remote_code: bool = False


class RewardWorker(Worker):
    """A worker that scores rows with the run's reward; calls are sequential unless the reward is asynchronous."""

    def __init__(self, setup: RewardWorkerSetup) -> None:
        tokenizer = load_tokenizer(setup.model_path, setup.trust_remote_code)
        self._scorer = RewardScorer(setup.reward, tokenizer)

    @register(dispatch_mode="dp_compute_proto")
    async def score(self, rows: DataProto) -> DataProto:
        """Return the object column ``reward_results``, a :class:`RewardResult` for each row; None for fillers.

        Args:
            rows: columns that :class:`~rollcast_rewards.scoring.GeneratedSamples` reads, and ``filler`` bool ``[B]``.
        """
        counted = rows[_FILLER].logical_not()
        results: list[RewardResult | None] = [None] * len(rows)
        if bool(counted.any()):
            wanted = counted.nonzero().flatten()
            scored = await asyncio.to_thread(self._scorer.scored, rows.select_idxs(wanted))
            for row, result in zip(wanted.tolist(), scored.non_tensor_batch[RESULTS], strict=True):
                results[row] = result
        return DataProto.from_dict({}, {RESULTS: results})

    def close(self) -> None:
        """Release the manager's processes and threads."""
        self._scorer.close()


class RewardWorkers:
    """A callable that scores rows on the reward workers of a run; thread-safe.

    Args:
        group: workers of the class :class:`RewardWorker`.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def __call__(self, rows: DataProto) -> Sequence[RewardResult]:
        """Return a result for each row.

        Raises:
            RewardError: the reward failed on a row, and the settings do not allow it.
            WorkerError: a worker was lost.
        """
        missing = -len(rows) % self._group.world_size
        padded = rows.with_columns({_FILLER: torch.zeros(len(rows), dtype=torch.bool)})
        if missing:
            fillers = padded.select_idxs(torch.zeros(missing, dtype=torch.int64))
            padded = DataProto.concat([padded, fillers.with_columns({_FILLER: torch.ones(missing, dtype=torch.bool)})])
        try:
            results = self._group.score(padded)
        except WorkerError as error:
            if error.cause_type == RewardError.__name__:
                raise RewardError(str(error)) from error
            raise
        return list(results.non_tensor_batch[RESULTS])[: len(rows)]
