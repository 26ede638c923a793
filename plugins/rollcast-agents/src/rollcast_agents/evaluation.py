"""The generator ``agents``: ``rollcast eval`` and ``rollcast generate`` with agent loops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from rollcast import WorkerGroup, build_section
from rollcast.contracts.rollout import SamplingParams
from rollcast.contracts.worker import ClassWithInitArgs
from rollcast.protocol import DataProto
from rollcast_agents.contracts.trajectory import Trajectory
from rollcast_agents.host import HostSetup, check_names
from rollcast_agents.records import Record, append_records, decode_segments, keep_groups, record_path
from rollcast_agents.schemas import AgentConfig
from rollcast_agents.training.manager import AgentLoopManager, Rollouts
from rollcast_agents.training.worker import AgentLoopWorker, AgentWorkerSetup
from rollcast_serving.contracts.generator import Answers, BaseGenerator, GeneratorSetup
from rollcast_serving.launcher import ReplicaAddress

__all__ = ["AgentAnswers"]

_ROLE = "agent_loop"
_TASK = ("ground_truth", "data_source", "extra_info")
#: Step number in the file of trajectories: an evaluation has a single step.
_STEP = 0
#: Prefix of the ids of rollouts, before the number of the prompt.
_NAME = "eval"


class AgentAnswers(BaseGenerator):
    """Generator that runs ``agent.loop`` once per sample.

    A sample's row in the file has the conversation as ``messages``, ``end``, ``failure`` and the rollout's metrics as
    ``metrics``. With ``agent.save_trajectories`` the folder beside the samples is a run directory with the
    configuration and one file of all trajectories (:mod:`rollcast_agents.records`).
    """

    @classmethod
    def is_wanted(cls, config: DictConfig) -> bool:
        return OmegaConf.select(config, "agent.loop") is not None

    @classmethod
    def scores_itself(cls, config: DictConfig) -> bool:
        names = ("agent.environment", "agent.interaction_config_path")
        return any(OmegaConf.select(config, name) is not None for name in names)

    def __init__(self, setup: GeneratorSetup) -> None:
        super().__init__(setup)
        self._config: AgentConfig = build_section(AgentConfig, setup.config.agent, "agent")
        check_names(self._config)
        self._manager: AgentLoopManager | None = None
        self._saves = self._config.save_trajectories > 0
        self._path = record_path(setup.folder, _STEP)

    def settings(self) -> dict[str, Any]:
        return {"agent": OmegaConf.to_container(self.setup.config.agent)}

    def resume(self, done: Collection[int]) -> None:
        if not self._saves:
            return
        keep_groups(self._path, {f"{_NAME}/{number}" for number in done})
        self.setup.folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.setup.config, self.setup.folder / "config.yaml")

    def workers(self) -> Mapping[str, ClassWithInitArgs[Any]]:
        host = HostSetup(self._config, self.setup.model_path, self.setup.max_total_tokens, self.setup.trust_remote_code)
        return {_ROLE: ClassWithInitArgs(AgentLoopWorker, AgentWorkerSetup(host, self.setup.routing))}

    def connect(
        self, groups: Mapping[Hashable, WorkerGroup], addresses: Callable[[], Sequence[ReplicaAddress]]
    ) -> None:
        self._manager = AgentLoopManager(groups[_ROLE], addresses)

    def generate(self, prompts: DataProto, seeds: torch.Tensor, sampling: SamplingParams) -> Answers:
        if self._manager is None:
            raise RuntimeError("connect() comes before generate()")
        rollouts = self._manager.roll_out(prompts, seeds, sampling, _NAME, int(self.setup.config.sample.seed))
        final = rollouts.batch["is_final"].tolist()
        chosen = [trajectory for trajectory, is_final in zip(rollouts.trajectories, final, strict=True) if is_final]
        save = functools.partial(self._save, prompts, rollouts) if self._saves else None
        return Answers(rollouts.batch, [_note(trajectory) for trajectory in chosen], save)

    def _save(self, prompts: DataProto, rollouts: Rollouts, scores: Sequence[float | None]) -> None:
        columns = prompts.non_tensor_batch
        names = [name for name in _TASK if name in columns]
        append_records(
            self._path,
            (
                Record(
                    trajectory,
                    {name: columns[name][row] for name in names},
                    scores[row],
                    decode_segments(trajectory, self.setup.tokenizer),
                )
                for trajectory, row in zip(rollouts.trajectories, rollouts.sources, strict=True)
            ),
        )


def _note(trajectory: Trajectory) -> dict[str, Any]:
    failure = trajectory.failure
    said = {"failure": {"boundary": failure.boundary, "message": failure.message}} if failure is not None else {}
    return {
        "messages": [dict(message) for message in trajectory.messages],
        "end": trajectory.end,
        # Loops without tools do not count calls, but the table shows these numbers for every loop.
        "metrics": {"tool_calls": 0.0, "tool_errors": 0.0, **trajectory.metrics},
        **said,
    }
