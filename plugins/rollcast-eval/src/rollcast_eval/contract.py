"""Contract of generators: other ways to answer the prompts of ``rollcast eval`` than one reply of a replica."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollcast.plugins import Registry, subclass_of

if TYPE_CHECKING:
    import torch
    from omegaconf import DictConfig

    from rollcast import WorkerGroup
    from rollcast.contracts.rollout import SamplingParams
    from rollcast.contracts.worker import ClassWithInitArgs
    from rollcast.protocol import DataProto
    from rollcast_serving.launcher import ReplicaAddress
    from rollcast_serving.manager import RoutingSettings

__all__ = ["Answers", "BaseGenerator", "GeneratorSetup", "generators"]


@dataclass(frozen=True)
class GeneratorSetup:
    """Arguments that a generator is built from.

    Attributes:
        config: the composed configuration.
        model_path: folder of the model and tokenizer.
        max_total_tokens: tokens of a prompt and its answer.
        routing: settings that spread requests over replicas.
    """

    config: DictConfig
    model_path: str
    max_total_tokens: int
    routing: RoutingSettings


@dataclass(frozen=True, eq=False)
class Answers:
    """Answers to some prompts.

    Attributes:
        batch: rows that a reward can score; those of one answer share ``rollout_index``, and one of them has
            ``is_final``.
        notes: JSON object for each answer, in the order of the prompts: ``metrics`` is a mapping of numbers.
    """

    batch: DataProto
    notes: Sequence[Mapping[str, Any]]


class BaseGenerator(ABC):
    """Answers prompts with workers of its own, which sample from the job's replicas."""

    @classmethod
    @abstractmethod
    def is_wanted(cls, config: DictConfig) -> bool:
        """Return True if the configuration asks for this generator."""

    def __init__(self, setup: GeneratorSetup) -> None:
        self.setup = setup

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return what the answers depend on, by name; JSON."""

    @abstractmethod
    def workers(self) -> Mapping[str, ClassWithInitArgs[Any]]:
        """Return the workers to start beside the replicas, by role."""

    @abstractmethod
    def connect(
        self, groups: Mapping[Hashable, WorkerGroup], addresses: Callable[[], Sequence[ReplicaAddress]]
    ) -> None:
        """Take the workers, by role, and what returns the replicas. Called once, before :meth:`generate`."""

    @abstractmethod
    def generate(self, prompts: DataProto, seeds: torch.Tensor, sampling: SamplingParams, name: str) -> Answers:
        """Answer each row of the prompts once.

        Args:
            prompts: columns of a dataset's batch; rows with the same ``uid`` are samples of one prompt.
            seeds: one for each answer, int64 ``[B]``.
            sampling: parameters of every reply that names none.
            name: name of this call, another for each.
        """


generators: Registry[type[BaseGenerator]] = Registry(
    "rollcast.generators", subclass_of(BaseGenerator), description="ways to answer the prompts of rollcast eval"
)
