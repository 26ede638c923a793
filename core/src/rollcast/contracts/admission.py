"""Contract of admissions: which groups of rollouts start when, and which finished ones a training step gets.

An admission reads no clock and starts nothing: its answers follow from the views that it has seen. Example, a queue
without a bound on the age of its tokens::

    class Eager(BaseAdmission):
        def room(self, view):
            return self.settings.groups_per_step - sum(not group.is_finished for group in view.groups)

        def select(self, view, count):
            ready = [group.number for group in view.groups if group.is_finished]
            return Selection(tuple(ready[:count]) if len(ready) >= count else ())
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from rollcast.plugins import Registry, subclass_of

__all__ = ["AdmissionSettings", "AdmissionView", "BaseAdmission", "Selection", "StartedGroup", "admissions"]


@dataclass(frozen=True)
class AdmissionSettings:
    """Sizes of a run that trains while it generates.

    Attributes:
        max_staleness: ``trainer.max_staleness``, 1 or more.
        groups_per_step: groups that a training step takes.
    """

    max_staleness: int
    groups_per_step: int


@dataclass(frozen=True)
class StartedGroup:
    """A group of rollouts, all of one prompt, that has started and that no step has taken.

    Attributes:
        number: place in the order of starts, from 0.
        version: version of the newest weights when it started.
        finished_as: place in the order of ends, from 0; None while it runs.
    """

    number: int
    version: int
    finished_as: int | None = None

    @property
    def is_finished(self) -> bool:
        """True if all its rollouts have ended."""
        return self.finished_as is not None


@dataclass(frozen=True)
class AdmissionView:
    """Everything that an admission decides by.

    Attributes:
        groups: groups that have started and that no step has taken, in the order of their starts.
        version: version of the newest weights.
        in_training: groups that the step under way has taken; 0 once its weights are published.
        started: number of groups that have started since the beginning of the run.
    """

    groups: Sequence[StartedGroup]
    version: int
    in_training: int
    started: int


@dataclass(frozen=True)
class Selection:
    """Groups for a step.

    Attributes:
        take: numbers of the groups to train, in order; as many as were asked for, or none.
        drop: numbers of finished groups that are never trained.
    """

    take: tuple[int, ...] = ()
    drop: tuple[int, ...] = ()


class BaseAdmission(ABC):
    """Paces the groups of rollouts of one run."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self.settings = settings

    @property
    def max_age(self) -> int | None:
        """Largest age of a trained token that this rule guarantees, in versions; None if it guarantees none."""
        return None

    def observe(self, view: AdmissionView) -> None:  # noqa: B027  # most admissions keep nothing in mind
        """Look at the groups at the moment when a step has published its weights and the next one asks for groups."""

    @abstractmethod
    def room(self, view: AdmissionView) -> int:
        """Return how many further groups may start now; 0 or less for none."""

    @abstractmethod
    def select(self, view: AdmissionView, count: int) -> Selection:
        """Return the ``count`` groups that a step gets now; none if it has to wait for groups that run."""


admissions: Registry[type[BaseAdmission]] = Registry(
    "rollcast.admissions",
    subclass_of(BaseAdmission),
    "trainer.admission",
    description="pacing of rollouts beside training",
)
