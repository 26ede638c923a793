"""First-party admissions: a windowed queue, AReaL's capacity, and dropping of stale groups."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rollcast_serving.contracts.admission import (
    AdmissionSettings,
    AdmissionView,
    BaseAdmission,
    Selection,
    StartedGroup,
)

__all__ = ["Capacity", "Drop", "WindowedFifo"]

#: Fraction of the buffer within which finished groups may overtake the oldest one.
_WINDOW = 0.3


class WindowedFifo(BaseAdmission):
    """A first-in-first-out buffer in which only groups near its head may overtake (torchtitan's rule).

    At most ``B = (max_staleness + 1) * groups_per_step`` groups have started and are not trained yet. A step takes
    finished groups among the ``W = max(1, floor(0.3 B))`` starts from the oldest one on. So a group has at most ``B -
    1`` groups before it when it starts and is overtaken by at most ``W - 1``, which bounds the age of each of its
    tokens by ``max_staleness + ceil((W - 1) / groups_per_step)``. Nothing is dropped.

    The buffer is filled only as far as training needs it, because every waiting group ages. The number of groups in
    flight starts at that of two steps. It grows by the groups of one step whenever a step has to wait, up to ``B``, and
    shrinks by an eighth of the finished groups that a step leaves over.
    """

    def __init__(self, settings: AdmissionSettings) -> None:
        super().__init__(settings)
        self._limit = min(2 * settings.groups_per_step, self.buffer)

    def observe(self, view: AdmissionView) -> None:
        size = self.settings.groups_per_step
        if not self.select(view, size).take:
            self._limit = min(self._limit + size, self.buffer)
        else:
            spare = sum(group.is_finished for group in view.groups) - size
            self._limit = max(self._limit - math.ceil(spare / 8), min(2 * size, self.buffer))

    @property
    def buffer(self) -> int:
        """Maximum number of groups that have started and are not trained yet."""
        return (self.settings.max_staleness + 1) * self.settings.groups_per_step

    @property
    def window(self) -> int:
        """Number of starts, counted from the oldest group, among which a step may choose."""
        return max(1, int(_WINDOW * self.buffer))

    @property
    def max_age(self) -> int:
        if not self.settings.max_staleness:
            return 0  # all started groups are taken together
        return self.settings.max_staleness + math.ceil((self.window - 1) / self.settings.groups_per_step)

    def room(self, view: AdmissionView) -> int:
        # A step that takes extra groups to replace some that it leaves out still trains only its size.
        return self._limit - len(view.groups) - min(view.in_training, self.settings.groups_per_step)

    def select(self, view: AdmissionView, count: int) -> Selection:
        if sum(group.is_finished for group in view.groups) < count:
            return Selection()
        left, window = list(view.groups), self.window
        chosen: list[int] = []
        while len(chosen) < count:
            last = left[0].number + window
            place = next((place for place, group in enumerate(left) if group.is_finished or group.number >= last), None)
            if place is None or left[place].number >= last:
                return Selection()
            chosen.append(left.pop(place).number)
        return Selection(tuple(chosen))


class Capacity(BaseAdmission):
    """AReaL's rule: at most ``(version + max_staleness + 1) * groups_per_step`` starts (arXiv:2505.24298, §5.1).

    Steps take groups in the order in which they finished, so a long group can be overtaken without bound.
    """

    def room(self, view: AdmissionView) -> int:
        size = self.settings.groups_per_step
        waiting = len(view.groups) + min(view.in_training, size)
        return (self.settings.max_staleness + 1) * size - waiting

    def select(self, view: AdmissionView, count: int) -> Selection:
        return Selection(_first_ended(view.groups, count))


class Drop(BaseAdmission):
    """Generation without waiting; groups older than ``max_staleness`` are dropped, and their work is lost.

    For comparison with the other admissions.
    """

    @property
    def max_age(self) -> int:
        return self.settings.max_staleness

    def room(self, view: AdmissionView) -> int:
        running = sum(not group.is_finished for group in view.groups)
        return (self.settings.max_staleness + 1) * self.settings.groups_per_step - running

    def select(self, view: AdmissionView, count: int) -> Selection:
        oldest = view.version - self.settings.max_staleness
        fresh = [group for group in view.groups if group.version >= oldest]
        old = tuple(group.number for group in view.groups if group.version < oldest and group.is_finished)
        return Selection(_first_ended(fresh, count), old)


def _first_ended(groups: Sequence[StartedGroup], count: int) -> tuple[int, ...]:
    ended = sorted((group.finished_as, group.number) for group in groups if group.finished_as is not None)
    return tuple(number for _, number in ended[:count]) if len(ended) >= count else ()
