"""The conformance suite of admissions.

Example, in a plugin's tests::

    from rollcast_serving.testing import AdmissionSuite

    class TestEager(AdmissionSuite):
        name = "eager"
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import pytest

from rollcast_serving.contracts.admission import (
    AdmissionSettings,
    AdmissionView,
    BaseAdmission,
    Selection,
    StartedGroup,
    admissions,
)

__all__ = ["AdmissionSuite"]


class _Game:
    """A simulated run in which groups end in a random order."""

    def __init__(self, admission: BaseAdmission, seed: int) -> None:
        self.admission, self.random = admission, random.Random(seed)  # noqa: S311  # no secret
        self.groups: list[StartedGroup] = []
        self.version = self.in_training = self.started = self.finished = 0
        self.most_open = 0

    @property
    def view(self) -> AdmissionView:
        return AdmissionView(tuple(self.groups), self.version, self.in_training, self.started)

    def step(self) -> Iterator[tuple[AdmissionView, Selection]]:
        """Run until a step has its groups; yield every selection with its view.

        Raises:
            AssertionError: a deadlock, in which nothing runs, nothing starts, and the step has no groups.
        """
        count = self.admission.settings.groups_per_step
        while True:
            for _ in range(max(self.admission.room(self.view), 0)):
                self.groups.append(StartedGroup(self.started, self.version))
                self.started += 1
            self.most_open = max(self.most_open, len(self.groups))
            view = self.view
            selection = self.admission.select(view, count)
            yield view, selection
            gone = {*selection.take, *selection.drop}
            self.groups = [group for group in self.groups if group.number not in gone]
            if selection.take:
                self.in_training = len(selection.take)
                return
            running = [place for place, group in enumerate(self.groups) if not group.is_finished]
            if running:
                self._end(self.random.choice(running))
            elif not selection.drop:
                raise AssertionError(
                    f"deadlock in version {self.version}: no group runs, room is {self.admission.room(self.view)}, and "
                    f"select() takes none of {len(self.groups)} finished groups"
                )

    def publish(self) -> AdmissionView:
        """End a step and return the view passed to the admission."""
        self.version, self.in_training = self.version + 1, 0
        view = self.view
        self.admission.observe(view)
        return view

    def _end(self, place: int) -> None:
        self.groups[place] = replace(self.groups[place], finished_as=self.finished)
        self.finished += 1


class AdmissionSuite:
    """Conformance tests of one admission; subclass it and set the name.

    Attributes:
        name: name of the admission in ``rollcast.admissions``.
        settings: settings of the simulated runs.
        steps: number of training steps of each run.
    """

    name: ClassVar[str] = ""
    settings: ClassVar[Sequence[AdmissionSettings]] = (
        AdmissionSettings(1, 1),
        AdmissionSettings(1, 8),
        AdmissionSettings(2, 3),
        AdmissionSettings(4, 5),
    )
    steps: ClassVar[int] = 40

    def build(self, settings: AdmissionSettings) -> BaseAdmission:
        """Build an admission; override it for one that is not registered."""
        return admissions.get(self.name)(settings)

    @pytest.fixture(params=range(4), ids=lambda number: f"settings{number}")
    def games(self, request: pytest.FixtureRequest) -> list[_Game]:
        """Return runs with one of the settings and different orders in which groups end."""
        if request.param >= len(self.settings):
            pytest.skip("the suite has fewer settings")
        settings = self.settings[request.param]
        return [_Game(self.build(settings), seed) for seed in range(5)]

    def test_every_step_gets_its_groups(self, games: list[_Game]) -> None:
        """Check that a run never deadlocks and that a step gets the number of groups it requested."""
        for game in games:
            for _ in range(self.steps):
                takes = [selection.take for _, selection in game.step() if selection.take]
                assert [len(take) for take in takes] == [game.admission.settings.groups_per_step]
                game.publish()

    def test_only_finished_groups_are_taken_and_each_once(self, games: list[_Game]) -> None:
        """Check that taken and dropped groups have ended, are in the view, and are named only once."""
        for game in games:
            for _ in range(self.steps):
                for view, selection in game.step():
                    named = [*selection.take, *selection.drop]
                    ended = {group.number for group in view.groups if group.is_finished}
                    assert len(set(named)) == len(named)
                    assert set(named) <= ended
                game.publish()

    def test_trained_groups_are_no_older_than_promised(self, games: list[_Game]) -> None:
        """Check that no taken group exceeds ``max_age``, in any order in which groups end."""
        for game in games:
            bound = game.admission.max_age
            if bound is None:
                pytest.skip("the admission promises no bound")
            for _ in range(self.steps):
                for view, selection in game.step():
                    versions = {group.number: group.version for group in view.groups}
                    ages = [view.version - versions[number] for number in selection.take]
                    assert max(ages, default=0) <= bound
                game.publish()

    def test_the_views_decide(self, games: list[_Game]) -> None:
        """Check that decisions depend only on the observed views, so that a run can be simulated."""
        for game in games:
            again = self.build(game.admission.settings)
            for _ in range(self.steps):
                for view, selection in game.step():
                    count = game.admission.settings.groups_per_step
                    assert again.select(view, count) == selection
                    assert again.room(view) == game.admission.room(view)
                again.observe(game.publish())
