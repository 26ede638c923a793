"""The judge of a command, which is started together with its other workers and passed to its rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from rollcast import WorkerGroup
from rollcast.contracts.reward import Judge, RewardResult
from rollcast.contracts.runtime import Runtime
from rollcast.contracts.worker import ClassWithInitArgs
from rollcast_data.tokenizer import load_tokenizer, read_stop_token_ids
from rollcast_serving.judge import ServedJudge, judge_role, judge_sampling
from rollcast_serving.replica_loop import ReplicaLoop
from rollcast_serving.replicas import Replicas
from rollcast_serving.schemas import JudgeConfig
from rollcast_serving.served import ServedModel, ServedRole
from rollcast_serving.worker import ReplicaWorker

__all__ = ["NEEDS_JUDGE", "CommandJudge"]

#: End of the error message for a reward that needs a judge if there is none.
NEEDS_JUDGE = "asks a judge, and judge.enable is false; set judge.enable=true, judge.model.path and judge.rollout.name"


class AsksJudge(Protocol):
    """A scorer whose reward may query a judge; see ``rollcast_rewards.scoring.RewardScorer``."""

    def bind_judge(
        self,
        judge: Judge,
        wait_for: Callable[[Callable[[], Sequence[RewardResult]]], Sequence[RewardResult]],
        take_metrics: Callable[[], dict[str, float]],
    ) -> None:
        """Set the judge, a function that runs a call in another thread, and one that returns the judge's metrics."""


class CommandJudge:
    """The judge of a command that enables the section ``judge``.

    Args:
        config: section ``judge``.
        role: role of the judge's replicas.
    """

    def __init__(self, config: JudgeConfig, role: ServedRole) -> None:
        self._config, self._role = config, role

    @classmethod
    def of(cls, config: JudgeConfig, processes: Sequence[int]) -> CommandJudge | None:
        """Return the judge of a section; None if the judge is not enabled.

        Args:
            config: the section.
            processes: number of processes on each node of the judge's pool.

        Raises:
            RollcastError: the section cannot be served; see :func:`rollcast_serving.judge.judge_role`.
        """
        role = judge_role(config)
        if role is None:
            return None
        role.check_nodes(processes)
        return cls(config, role)

    def worker(self, seed: int, device: str, log_dir: str | None = None) -> ClassWithInitArgs[ReplicaWorker]:
        """Return the worker that hosts a replica; see :meth:`ServedRole.worker`."""
        path, trust = str(self._config.model.path), self._config.model.trust_remote_code
        tokenizer = load_tokenizer(path, trust)
        model = ServedModel.of(path, tokenizer, read_stop_token_ids(path, tokenizer), trust)
        return self._role.worker(model, seed, device, log_dir)

    def start(
        self,
        group: WorkerGroup,
        runtime: Runtime,
        loop: ReplicaLoop,
        scorers: Iterable[AsksJudge],
        busy: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Replicas:
        """Start the replicas, and bind the rewards to the judge.

        Args:
            group: workers of the role.
            runtime: runtime of the command.
            loop: event loop that all replicas of the command share.
            scorers: scorers of the command's samples.
            busy: function that returns a context in which a reply is generated.

        Raises:
            WorkerError: a replica cannot be started.
        """
        replicas = self._role.start(group, runtime, loop)
        tokenizer = load_tokenizer(str(self._config.model.path), self._config.model.trust_remote_code)
        judge = ServedJudge.of_replicas(replicas, tokenizer, judge_sampling(self._config, self._role), busy)
        for scorer in scorers:
            scorer.bind_judge(judge, lambda call: replicas.run(asyncio.to_thread(call)), judge.take_metrics)
        return replicas
