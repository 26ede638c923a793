"""The generator ``agents``: ``rollcast eval`` and ``rollcast generate`` with agent loops."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from rollcast import WorkerGroup, build_section
from rollcast.contracts.rollout import SamplingParams
from rollcast.contracts.trajectory import Trajectory
from rollcast.contracts.worker import ClassWithInitArgs
from rollcast.protocol import DataProto
from rollcast_agents.host import HostSetup, check_names
from rollcast_agents.schemas import AgentConfig
from rollcast_agents.training.manager import AgentLoopManager
from rollcast_agents.training.worker import AgentLoopWorker, AgentWorkerSetup
from rollcast_eval.contract import Answers, BaseGenerator, GeneratorSetup
from rollcast_serving.launcher import ReplicaAddress

__all__ = ["AgentAnswers"]

_ROLE = "agent_loop"


class AgentAnswers(BaseGenerator):
    """A rollout of ``agent.loop`` for each sample.

    A sample's row in the file has the conversation as ``messages``, ``end``, ``failure`` and the rollout's numbers as
    ``metrics``.
    """

    @classmethod
    def is_wanted(cls, config: DictConfig) -> bool:
        return OmegaConf.select(config, "agent.loop") is not None

    def __init__(self, setup: GeneratorSetup) -> None:
        super().__init__(setup)
        self._config: AgentConfig = build_section(AgentConfig, setup.config.agent, "agent")
        check_names(self._config)
        self._manager: AgentLoopManager | None = None

    def settings(self) -> dict[str, Any]:
        return {"agent": OmegaConf.to_container(self.setup.config.agent)}

    def workers(self) -> Mapping[str, ClassWithInitArgs[Any]]:
        host = HostSetup(self._config, self.setup.model_path, self.setup.max_total_tokens)
        return {_ROLE: ClassWithInitArgs(AgentLoopWorker, AgentWorkerSetup(host, self.setup.routing))}

    def connect(
        self, groups: Mapping[Hashable, WorkerGroup], addresses: Callable[[], Sequence[ReplicaAddress]]
    ) -> None:
        self._manager = AgentLoopManager(groups[_ROLE], addresses)

    def generate(self, prompts: DataProto, seeds: torch.Tensor, sampling: SamplingParams, name: str) -> Answers:
        if self._manager is None:
            raise RuntimeError("connect() comes before generate()")
        rollouts = self._manager.roll_out(prompts, seeds, sampling, name, int(self.setup.config.sample.seed))
        final = rollouts.batch["is_final"].tolist()
        chosen = [each for each, is_final in zip(rollouts.trajectories, final, strict=True) if is_final]
        return Answers(rollouts.batch, [_note(each) for each in chosen])


def _note(trajectory: Trajectory) -> dict[str, Any]:
    failure = trajectory.failure
    said = {"failure": {"boundary": failure.boundary, "message": failure.message}} if failure is not None else {}
    return {
        "messages": [dict(message) for message in trajectory.messages],
        "end": trajectory.end,
        "metrics": dict(trajectory.metrics),
        **said,
    }
