"""The contract of stages: the pieces that a training step is made of, supplied on demand.

For each column that a stage reads and nobody has written yet, the registered stage that writes it is put in before::

    class Difficulty(Stage):
        spec = StageSpec(reads=("uid", "token_level_scores"), writes=("difficulty",))

        def __call__(self, batch):
            wrong = (batch["token_level_scores"].sum(-1) <= 0).float()
            self.run.record({"reward/difficulty": float(wrong.mean())})
            return batch.with_columns({"difficulty": wrong})
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rollcast.plugins import Registry, is_callable, subclass_of

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from rollcast.protocol import DataProto

__all__ = ["Stage", "StageRun", "StageSpec", "roles", "stages"]


@dataclass(frozen=True)
class StageSpec:
    """Declaration of a stage, made before anything starts.

    Attributes:
        reads: columns that the stage needs; the stages that write them are put in before it.
        optional: columns that it reads if a stage writes them; they only decide the order.
        writes: columns that it adds or replaces. A name that ends with ``/`` stands for all with this prefix.
        roles: roles whose workers it calls; the first computes it. Empty for a stage of the driver.
        after: names of stages that come before this one, if they are in the list.
        brings: names of stages that are put into the list with this one.
        replaces: names of stages that this one takes the place of in a run in which it has a part.
        changes_rows: True if it adds, removes or reorders rows; all that it does not depend on comes after it.
        is_recorded: True if it makes or scores rollouts: what it does is part of the record that a run replays in its
            place.
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
    """The run as a stage sees it.

    Attributes:
        config: composed configuration.
        step: number of the step under way, from 1.
    """

    config: DictConfig
    step: int

    def section(self, path: str, schema: type) -> Any:
        """Return a section of the configuration as an instance of its dataclass."""

    def record(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to those of the step."""

    def workers(self, role: str) -> Any:
        """Return the worker group of a role; only in a step."""

    def call(self, role: str, method: str, batch: DataProto) -> DataProto:
        """Return what a method of a role's workers returns for each row of ``batch``, in order; only in a step."""


class Stage(ABC):
    """One stage of a training step; built once a run with a :class:`StageRun`, before the workers start."""

    spec: ClassVar[StageSpec] = StageSpec()  #: Declaration that does not depend on the configuration.
    phase: ClassVar[str] = ""  #: Name in ``time/<phase>_s``; empty for the stage's own name.

    def __init__(self, run: Any) -> None:
        self.run = run

    @classmethod
    def declare(cls, run: Any) -> StageSpec | None:  # noqa: ARG003  # for those that override it
        """Return the declaration for this run's configuration; None if the stage has no part in it."""
        return cls.spec

    def configure(self, role: str, setup: Any) -> Any:
        """Return the constructor argument of a role's workers, adjusted to this stage."""
        return setup

    @abstractmethod
    def __call__(self, batch: DataProto) -> DataProto:
        """Return the batch with the declared columns; the given batch stays as it is.

        Columns of the batch may lie with workers. One that is read is fetched, and its call awaited; ``batch.local``
        fetches several at once and does not keep them.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the stage, as JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027  # most stages have no state
        """Restore what :meth:`state_dict` returned."""


stages: Registry[type[Stage]] = Registry(
    "rollcast.stages", subclass_of(Stage), "trainer.stages.insert", description="stages of a training step"
)
roles: Registry[Any] = Registry(
    "rollcast.roles", is_callable(1), description="worker classes that play the roles of a run"
)
