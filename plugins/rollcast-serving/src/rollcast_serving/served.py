"""Roles that replicas play: from the config section to running processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rollcast import WorkerGroup
from rollcast.contracts.device import hide_accelerators
from rollcast.contracts.rollout import BaseRollout
from rollcast.contracts.runtime import Runtime
from rollcast.contracts.worker import ClassWithInitArgs
from rollcast_serving.launcher import ReplicaSpec
from rollcast_serving.manager import RoutingSettings
from rollcast_serving.replica_loop import ReplicaLoop
from rollcast_serving.replicas import Replicas
from rollcast_serving.shapes import ReplicaShape, check_spans
from rollcast_serving.worker import ReplicaWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ServedModel", "ServedRole"]


@dataclass(frozen=True)
class ServedModel:
    """The model of a served role.

    Attributes:
        path: folder of the model and tokenizer.
        pad_token_id, eos_token_id: ids of the tokenizer.
        stop_token_ids: ids that end every response; see :class:`~rollcast.contracts.rollout.RolloutSetup`.
        trust_remote_code: allow the folder's own Python code.
    """

    path: str
    pad_token_id: int
    eos_token_id: int
    stop_token_ids: tuple[int, ...] = ()
    trust_remote_code: bool = False

    @classmethod
    def of(
        cls,
        path: str,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Sequence[int],
        trust_remote_code: bool = False,
    ) -> ServedModel:
        """Return the model with its tokenizer's ids."""
        ids = int(tokenizer.pad_token_id), int(tokenizer.eos_token_id)
        return cls(path, *ids, tuple(stop_token_ids), trust_remote_code)


@dataclass(frozen=True)
class ServedRole:
    """A role of a run whose workers are replicas of an engine.

    Attributes:
        role: name in ``placement.mapping``.
        section: dotted key of its section.
        config: the section, an instance of the rollout's schema.
        rollout_class: the rollout of its ``name``.
    """

    role: str
    section: str
    config: Any
    rollout_class: type[BaseRollout]

    def check_nodes(self, processes: Sequence[int]) -> None:
        """Check that replicas fill the role's pool; see :func:`~rollcast_serving.shapes.check_spans`.

        Raises:
            ConfigError, CapabilityError: they do not, or cannot span its nodes; the message names the keys.
        """
        multi_node = self.rollout_class.capabilities.multi_node
        check_spans(ReplicaShape.of(self.config), processes, multi_node, self.config.name, self.section)

    def routing(self) -> RoutingSettings:
        """Return the limits of routing and recovery."""
        replica = self.config.replica
        continuous = self.rollout_class.capabilities.continuous_batching
        return RoutingSettings(
            replica.heartbeat_timeout_s, replica.max_restarts, continuous=continuous, section=self.section
        )

    def worker(
        self, model: ServedModel, seed: int, device: str, log_dir: str | None = None
    ) -> ClassWithInitArgs[ReplicaWorker]:
        """Return the worker that hosts a replica.

        Args:
            model: model that the replicas serve.
            seed: seed of the first replica's sampler.
            device: value of ``placement.device``; ``cpu`` hides accelerators from the engines.
            log_dir: folder of the processes' output; None for a temporary one.
        """
        replica = self.config.replica
        hidden = hide_accelerators() if device == "cpu" else {}
        spec = ReplicaSpec(
            rollout=asdict(self.config),
            model_path=model.path,
            seed=seed,
            pad_token_id=model.pad_token_id,
            eos_token_id=model.eos_token_id,
            stop_token_ids=model.stop_token_ids,
            trust_remote_code=model.trust_remote_code,
            python=replica.python,
            env={**hidden, **self.rollout_class.environment(self.config), **replica.env},
            launch_timeout_s=replica.launch_timeout_s,
            log_dir=log_dir,
            multi_node=self.rollout_class.capabilities.multi_node,
            role=self.role,
            section=self.section,
        )
        return ClassWithInitArgs(ReplicaWorker, spec, self.config.replica_size)

    def start(self, group: WorkerGroup, runtime: Runtime, loop: ReplicaLoop | None = None) -> Replicas:
        """Start the replicas on a group of the role's workers; return them.

        Raises:
            WorkerError: a replica cannot be started.
        """
        one_node = len(runtime.nodes()) == 1
        return Replicas(group, self.routing(), self.config.replica.launch_timeout_s, one_node, loop)
