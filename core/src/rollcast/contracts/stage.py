"""Contract of stages, which make up a training step and are inserted on demand.

If a stage reads a column that no earlier stage writes, the registered stage that writes it is inserted before::

    class Difficulty(Stage):
        spec = StageSpec(reads=("uid", "token_level_scores"), writes=("difficulty",))

        def __call__(self, batch):
            wrong = (batch["token_level_scores"].sum(-1) <= 0).float()
            self.run.record({"reward/difficulty": float(wrong.mean())})
            return batch.with_columns({"difficulty": wrong})
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rollcast.plugins import Registry, is_callable, subclass_of

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from rollcast.protocol import DataProto

__all__ = ["Stage", "StageRun", "StageSpec", "roles", "stages"]


@dataclass(frozen=True)
class StageSpec:
    """A stage's declaration of its inputs and outputs, evaluated before the run starts.

    Attributes:
        reads: columns that the stage needs; the stages that write them are inserted before it.
        optional: columns that the stage reads if another stage writes them; they only affect the order.
        writes: columns that the stage adds or replaces. A name that ends with ``/`` stands for all columns with this
            prefix.
        roles: roles whose workers the stage calls; the first role computes the stage. Empty for a stage that runs on
            the driver.
        after: names of stages that precede this one if they are in the list.
        brings: names of stages that are added to the list together with this one.
        replaces: names of stages that this one replaces if it takes part in the run.
        changes_rows: True if the stage adds, removes or reorders rows; stages that it does not depend on run after it.
        is_recorded: True if the stage generates or scores rollouts. Its output is part of the recorded rollouts, and a
            replay uses the record instead of running the stage.
    """

    reads: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    brings: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()
    changes_rows: bool = False
    is_recorded: bool = False


class StageRun(Protocol):
    """A stage's interface to the run.

    Attributes:
        config: composed configuration.
        step: number of the current step, from 1.
    """

    config: DictConfig
    step: int

    def section(self, path: str, schema: type) -> Any:
        """Return a section of the configuration as an instance of its dataclass."""

    def record(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to those of the step."""

    def workers(self, role: str) -> Any:
        """Return the worker group of a role; only available during a step."""

    def call(self, role: str, method: Callable[[Any, DataProto], DataProto], batch: DataProto) -> DataProto:
        """Call a method of a role's workers that returns a row for each row of ``batch``; only during a step.

        Args:
            role: name of the role.
            method: function of the worker's class, such as ``JudgeWorker.score``.
            batch: rows to send.
        """


class Stage(ABC):
    """Base class of stages of a training step, built once per run from a :class:`StageRun`, before workers start."""

    spec: ClassVar[StageSpec] = StageSpec()  #: Declaration that does not depend on the configuration.
    phase: ClassVar[str] = ""  #: Name in the metric ``time/<phase>_s``; empty for the stage's name.

    def __init__(self, run: Any) -> None:
        self.run = run

    @classmethod
    def declare(cls, run: Any) -> StageSpec | None:  # noqa: ARG003  # for those that override it
        """Return the declaration for this run's configuration; None if the stage takes no part in the run."""
        return cls.spec

    @abstractmethod
    def __call__(self, batch: DataProto) -> DataProto:
        """Return the batch with the declared columns added, without changing ``batch``.

        Columns of the batch may be stored on workers. Reading such a column waits for its call and fetches the column;
        ``batch.local`` fetches several columns at once and does not cache them.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the stage's state for a checkpoint, as JSON-compatible values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027  # most stages have no state
        """Restore state returned by :meth:`state_dict`."""


stages: Registry[type[Stage]] = Registry(
    "rollcast.stages", subclass_of(Stage), "trainer.stages.insert", description="stages of a training step"
)
roles: Registry[Any] = Registry("rollcast.roles", is_callable(1), description="worker classes for the roles of a run")
