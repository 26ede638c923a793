"""Contract of generators, which answer the prompts of ``rollcast eval`` with more than one reply of a replica."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast.plugins import Registry, subclass_of

if TYPE_CHECKING:
    import torch
    from omegaconf import DictConfig
    from transformers import PreTrainedTokenizerBase

    from rollcast import WorkerGroup
    from rollcast.contracts.rollout import SamplingParams
    from rollcast.contracts.worker import ClassWithInitArgs
    from rollcast.protocol import DataProto
    from rollcast_serving.launcher import ReplicaAddress
    from rollcast_serving.manager import RoutingSettings

__all__ = ["Answers", "BaseGenerator", "GeneratorSetup", "dataset_name", "generators"]


@dataclass(frozen=True)
class GeneratorSetup:
    """Constructor arguments of a generator.

    Attributes:
        config: the composed configuration.
        model_path: folder of the model and tokenizer.
        max_total_tokens: largest number of tokens of a prompt and its answer.
        routing: settings that spread requests over replicas.
        tokenizer: tokenizer of the model.
        folder: folder for further files; may not exist yet.
        trust_remote_code: allow the model folder's own Python code.
    """

    config: DictConfig
    model_path: str
    max_total_tokens: int
    routing: RoutingSettings
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    trust_remote_code: bool = False


@dataclass(frozen=True, eq=False)
class Answers:
    """Answers to some prompts.

    Attributes:
        batch: rows that a reward can score; those of one answer share ``rollout_index``, and one of them has
            ``is_final``.
        notes: JSON object for each answer, in the order of the prompts: ``metrics`` is a mapping of numbers.
        save: function that writes further files. It takes the score of each answer, None without a reward, and is
            called before the samples are written; None if there are no such files.
    """

    batch: DataProto
    notes: Sequence[Mapping[str, Any]]
    save: Callable[[Sequence[float | None]], None] | None = None


class BaseGenerator(ABC):
    """Base class of generators, which answer prompts with their own workers and sample from the job's replicas."""

    @classmethod
    @abstractmethod
    def is_wanted(cls, config: DictConfig) -> bool:
        """Return True if the configuration asks for this generator."""

    @classmethod
    def scores_itself(cls, config: DictConfig) -> bool:  # noqa: ARG003  # for subclasses
        """Return True if rows of prompts need no reference answer and no prompt, as an environment provides both."""
        return False

    def __init__(self, setup: GeneratorSetup) -> None:
        self.setup = setup

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the settings that the answers depend on, by name, as JSON-compatible values."""

    @abstractmethod
    def resume(self, done: Collection[int]) -> None:
        """Remove what an interrupted command saved for prompts not in ``done``; called before :meth:`generate`."""

    @abstractmethod
    def workers(self) -> Mapping[str, ClassWithInitArgs[Any]]:
        """Return the workers to start in addition to the replicas, by role."""

    @abstractmethod
    def connect(
        self, groups: Mapping[Hashable, WorkerGroup], addresses: Callable[[], Sequence[ReplicaAddress]]
    ) -> None:
        """Set the worker groups by role and the replicas' addresses; called once, before :meth:`generate`."""

    @abstractmethod
    def generate(self, prompts: DataProto, seeds: torch.Tensor, sampling: SamplingParams) -> Answers:
        """Answer each row of the prompts once.

        Args:
            prompts: columns of a dataset's batch. ``uid`` is the prompt's number in its file, shared by its samples.
            seeds: seed of each answer, int64 ``[B]``.
            sampling: default sampling parameters of every reply.
        """


generators: Registry[type[BaseGenerator]] = Registry(
    "rollcast.generators", subclass_of(BaseGenerator), description="ways to answer the prompts of rollcast eval"
)


def dataset_name(name: str, config: DictConfig) -> str:
    """Return the dataset of a config's prompts: ``tasks`` in place of ``prompts`` where an environment scores them.

    Args:
        name: registry name of the dataset that the config chooses.
        config: the composed configuration.
    """
    if name != "prompts":
        return name
    kinds = (generators.get(generator) for generator in generators.names())
    return "tasks" if any(kind.is_wanted(config) and kind.scores_itself(config) for kind in kinds) else name
