"""Contract of admissions, which decide when groups of rollouts start and which finished groups a step trains on.

An admission reads no clock and starts nothing: its decisions depend only on the views passed to it. This example is
a queue that does not bound the age of its tokens::

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
        groups_per_step: number of groups in a training step.
    """

    max_staleness: int
    groups_per_step: int


@dataclass(frozen=True)
class StartedGroup:
    """A group of rollouts of one prompt that has started and is not yet part of a training step.

    Attributes:
        number: position in the order in which groups started, from 0.
        version: version of the newest weights when the group started.
        finished_as: position in the order in which groups finished, from 0; None while the group runs.
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
    """State of a run that an admission bases its decisions on.

    Attributes:
        groups: groups that have started and are not yet part of a training step, in the order in which they started.
        version: version of the newest weights.
        in_training: number of groups in the current training step; 0 once its weights are published.
        started: number of groups that have started since the beginning of the run.
    """

    groups: Sequence[StartedGroup]
    version: int
    in_training: int
    started: int


@dataclass(frozen=True)
class Selection:
    """Groups to train on or drop in a step.

    Attributes:
        take: numbers of the groups to train on, in order; exactly ``count`` of them, or none.
        drop: numbers of finished groups to discard without training.
    """

    take: tuple[int, ...] = ()
    drop: tuple[int, ...] = ()


class BaseAdmission(ABC):
    """Base class of admissions, which pace the rollout groups of one run."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self.settings = settings

    @property
    def max_age(self) -> int | None:
        """Upper bound on the age of a trained token, in weight versions; None if this rule guarantees no bound."""
        return None

    def observe(self, view: AdmissionView) -> None:  # noqa: B027  # most admissions keep no state
        """Update internal state when a step has published its weights and the next step requests groups."""

    @abstractmethod
    def room(self, view: AdmissionView) -> int:
        """Return the number of further groups that may start now; 0 or less for none."""

    @abstractmethod
    def select(self, view: AdmissionView, count: int) -> Selection:
        """Return ``count`` groups for the next step; an empty selection if the step has to wait for running groups."""


admissions: Registry[type[BaseAdmission]] = Registry(
    "rollcast.admissions",
    subclass_of(BaseAdmission),
    "trainer.admission",
    description="pacing of rollouts beside training",
)
