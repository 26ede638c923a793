"""What starts and what is taken: bounds on the age of trained groups, and nothing lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcast_serving.admissions import Capacity, Drop, WindowedFifo
from rollcast_serving.contracts.admission import AdmissionSettings, AdmissionView, BaseAdmission, Selection, admissions
from rollcast_serving.service import GroupQueue
from rollcast_serving.simulation import TrainingPlan, simulate_training
from rollcast_serving.testing import AdmissionSuite
from rollcast_serving.testing.admissions import _Game


def heavy_tailed(seed: int, samples: int = 4) -> Callable[[int], Sequence[float]]:
    """Lengths with a mean of about 160 tokens, of which one in fifty is a hundred times the median."""

    def lengths(prompt: int) -> list[float]:
        drawn = random.Random(seed * 1_000_003 + prompt)
        return [min(100 * drawn.paretovariate(1.2), 10_000.0) for _ in range(samples)]

    return lengths


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_ages_stay_within_the_bound_over_500_steps(staleness: int) -> None:
    admission = WindowedFifo(AdmissionSettings(staleness, 8))
    plan = TrainingPlan(500, 8, train_s=8.0, sync_s=0.5, replicas=2, limit=16)
    run = simulate_training(admission, heavy_tailed(staleness), plan)
    assert len(run.steps) == 500
    ages = [age for step in run.steps for age in step.ages]
    assert len(ages) == 500 * 8
    assert max(ages) <= admission.max_age
    assert max(ages) >= staleness  # the bound is used, not merely kept
    assert run.dropped == 0


def test_rollouts_beside_training_save_the_shorter_of_the_two() -> None:
    """Generation takes about as long as training, so that turns cost twice as much."""
    plan = TrainingPlan(200, 16, train_s=10.0, tokens_per_s=50.0, limit=256)

    def lengths(prompt: int) -> list[float]:
        return [random.Random(prompt).uniform(300, 500) for _ in range(4)]

    turns = simulate_training(WindowedFifo(AdmissionSettings(0, 16)), lengths, plan)
    beside = simulate_training(WindowedFifo(AdmissionSettings(1, 16)), lengths, plan)
    assert beside.seconds <= 0.6 * turns.seconds
    assert turns.seconds == pytest.approx(200 * (10.0 + 500 / 50.0), rel=0.05)


def test_what_is_too_old_is_dropped_only_where_one_asks_for_it() -> None:
    plan = TrainingPlan(60, 8, train_s=4.0, replicas=2, limit=16)
    dropping = simulate_training(Drop(AdmissionSettings(1, 8)), heavy_tailed(3), plan)
    pacing = simulate_training(WindowedFifo(AdmissionSettings(1, 8)), heavy_tailed(3), plan)
    assert max(age for step in dropping.steps for age in step.ages) <= 1
    assert dropping.dropped > 0 == pacing.dropped


@given(
    st.sampled_from([WindowedFifo, Capacity]),
    st.integers(0, 4),
    st.integers(1, 9),
    st.randoms(use_true_random=False),
)
@settings(max_examples=100)
def test_every_group_is_taken_once_and_never_too_old(
    kind: type[BaseAdmission], staleness: int, size: int, random: random.Random
) -> None:
    """Any order of ends, also where a step asks for groups several times."""
    admission = kind(AdmissionSettings(staleness, size))
    queue: GroupQueue[int, int] = GroupQueue(admission)
    queue.submit(range(10_000))
    running: list[tuple[int, int]] = []
    trained: list[int] = []
    for version in range(1, 25):
        # Without staleness a step has all groups that may start; with it, a filter may ask for more of them.
        takes = random.choice([1, 1, 1, 2, 4]) if staleness else 1
        while takes:
            running += queue.start()
            assert len(running) + queue.load.ready <= (staleness + 1) * size
            if taken := queue.take(size):
                takes -= 1
                assert [each.result for each in taken] == [-each.task for each in taken]
                trained += [each.task for each in taken]
                if admission.max_age is not None:
                    assert max(version - 1 - each.version for each in taken) <= admission.max_age
            else:
                number, task = running.pop(random.randrange(len(running)))  # an empty list would be a deadlock
                queue.finish(number, -task)
        queue.publish(version)
    assert len(trained) == len(set(trained))
    left = {task for _, task in running} | {each.task for each in _drain(queue)}
    assert set(trained) | left >= set(range(max(trained) + 1))


def _drain(queue: GroupQueue[int, int]) -> list[object]:
    """Take whatever has finished."""
    found = []
    while queue.load.ready:
        number = next(number for number, group in queue._groups.items() if group.is_finished)
        found.append(queue._remove(number))
    return found


def test_only_the_window_overtakes() -> None:
    """Of 8 groups that have started, a step of 4 may take three that started after the first."""
    admission = WindowedFifo(AdmissionSettings(3, 4))  # a buffer of 16 groups and a window of 4
    queue: GroupQueue[str, None] = GroupQueue(admission)
    queue.submit("abcdefghijklmnopqrst")
    assert [task for _, task in queue.start()] == list("abcdefgh")  # two steps' groups at first
    for number in range(1, 8):
        queue.finish(number, None)
    assert queue.take(4) == []  # only b, c and d may overtake a
    queue.finish(0, None)
    assert [each.task for each in queue.take(4)] == list("abcd")
    assert queue.start() == []  # groups in training still count
    queue.publish(1)
    assert [task for _, task in queue.start()] == list("ijkl")


def test_the_buffer_is_filled_as_far_as_training_needs_it() -> None:
    """Fast generation keeps tokens young at no cost; slow generation gets the whole buffer."""
    admission = WindowedFifo(AdmissionSettings(4, 8))

    def ages(tokens: float) -> tuple[float, float]:
        run = simulate_training(admission, lambda _: [tokens] * 4, TrainingPlan(100, 8, train_s=10.0, limit=512))
        found = [age for step in run.steps[20:] for age in step.ages]
        return sum(found) / len(found), (run.steps[-1].ended_s - run.steps[20].ended_s) / 79

    assert ages(100.0) == (1.0, pytest.approx(10.0, rel=0.02))  # two seconds of generation, ten of training
    slow, seconds = ages(1900.0)  # 38 seconds of generation: all five steps' groups have to be under way
    assert slow > 3.5
    assert seconds == pytest.approx(10.0, rel=0.2)  # of the 48 seconds that taking turns needs


class TestWindowedFifo(AdmissionSuite):
    name = "windowed_fifo"


class TestCapacity(AdmissionSuite):
    name = "capacity"


class TestDrop(AdmissionSuite):
    name = "drop"


class Greedy(BaseAdmission):
    """Takes what has ended, whatever its age, and says that nothing is old."""

    max_age = 0

    def room(self, view: AdmissionView) -> int:
        return 2 * self.settings.groups_per_step - len(view.groups)

    def select(self, view: AdmissionView, count: int) -> Selection:
        ended = [group.number for group in view.groups if group.is_finished]
        return Selection(tuple(ended[:count]) if len(ended) >= count else ())


class Stuck(Greedy):
    """Starts less than a step needs."""

    def room(self, view: AdmissionView) -> int:
        return self.settings.groups_per_step - 1 - len(view.groups)


@pytest.mark.parametrize(
    ("kind", "law", "message"),
    [
        (Greedy, "test_trained_groups_are_no_older_than_promised", None),
        (Stuck, "test_every_step_gets_its_groups", "deadlock in version 0"),
    ],
)
def test_the_suite_fails_a_wrong_admission(kind: type[BaseAdmission], law: str, message: str | None) -> None:
    games = [_Game(kind(AdmissionSettings(2, 4)), seed) for seed in range(3)]
    with pytest.raises(AssertionError, match=message):
        getattr(AdmissionSuite(), law)(games)


def test_the_default_is_registered() -> None:
    assert admissions.get("windowed_fifo") is WindowedFifo
    assert {"capacity", "drop"} <= set(admissions.names())
