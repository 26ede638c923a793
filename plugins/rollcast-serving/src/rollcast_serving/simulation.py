"""Simulated engines and a simulated trainer on a simulated clock, for tests of scheduling and pacing."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollcast.contracts.admission import BaseAdmission
from rollcast.contracts.rollout import EngineLoad
from rollcast_serving.scheduling import SlidingWindow
from rollcast_serving.service import GroupQueue

__all__ = [
    "SimulatedEngine",
    "SimulatedRun",
    "SimulatedStep",
    "TrainingPlan",
    "ideal_makespan",
    "simulate_training",
    "simulate_window",
]


@dataclass
class SimulatedEngine:
    """An engine that computes up to ``limit`` sequences at once, one token of each per unit of time.

    Attributes:
        limit: number of sequences computed at once.
        ends: heap of the end times of running sequences, with their numbers.
        queue: numbers and lengths of waiting sequences.
    """

    limit: int
    ends: list[tuple[float, int]] = field(default_factory=list)
    queue: deque[tuple[int, float]] = field(default_factory=deque)

    def take(self, number: int, length: float, now: float) -> None:
        """Start a sequence, or queue it."""
        if len(self.ends) < self.limit:
            heapq.heappush(self.ends, (now + length, number))
        else:
            self.queue.append((number, length))

    def finish(self, now: float) -> list[int]:
        """End the sequences that are due, start waiting ones, and return the ended ones' numbers."""
        ended: list[int] = []
        while self.ends and self.ends[0][0] <= now:
            end, number = heapq.heappop(self.ends)
            ended.append(number)
            if self.queue:
                self.take(*self.queue.popleft(), end)
        return ended


def ideal_makespan(lengths: Sequence[float], slots: int) -> float:
    """Return the time until all sequences have ended if each free slot takes the next one without delay."""
    free = [0.0] * slots
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


def simulate_window(lengths: Sequence[float], replicas: int, limit: int, group: int = 1, latency: float = 0.0) -> float:
    """Return the time until all sequences have ended with the server manager's sliding window.

    Args:
        lengths: tokens of each sequence, in the queue's order.
        replicas: number of engines.
        limit: number of sequences that an engine computes at once.
        group: number of sequences per prompt, which stay together.
        latency: time of a message to or from a replica.
    """
    window: SlidingWindow[tuple[int, ...]] = SlidingWindow(replicas)
    engines = [SimulatedEngine(limit) for _ in range(replicas)]
    for place in range(replicas):
        window.open(place, EngineLoad(limit))
    numbers = list(range(len(lengths)))
    groups = [tuple(numbers[start : start + group]) for start in range(0, len(numbers), group)]
    window.submit((each, len(each)) for each in groups)
    due = [-1.0] * replicas  # time of the next end that is already scheduled
    order = itertools.count()  # keeps events of equal time in the order of their creation
    events: list[tuple[float, int, str, int, tuple[int, ...]]] = []

    def at(time: float, kind: str, place: int, what: tuple[int, ...] = ()) -> None:
        heapq.heappush(events, (time, next(order), kind, place, what))

    def send(time: float) -> None:
        for place, each in window.assign():
            at(time + latency, "arrive", place, each)

    send(0.0)
    now = 0.0
    while events:
        now, _, kind, place, what = heapq.heappop(events)
        engine = engines[place]
        if kind == "heard":
            window.finish(place, len(what))
            send(now)
            continue
        ended = tuple(engine.finish(now))
        if ended:
            at(now + latency, "heard", place, ended)
        for number in what:
            engine.take(number, lengths[number], now)
        if engine.ends and engine.ends[0][0] != due[place]:
            due[place] = engine.ends[0][0]
            at(due[place], "end", place)
    return now


@dataclass(frozen=True)
class TrainingPlan:
    """Sizes and speeds of a simulated run.

    Attributes:
        steps: training steps.
        groups_per_step: groups per training step.
        train_s: duration of a step's training in seconds.
        sync_s: duration of a weight sync in seconds; generation goes on meanwhile.
        tokens_per_s: tokens that an engine computes for each of its sequences in a second.
        replicas: number of engines.
        limit: number of sequences that an engine computes at once.
    """

    steps: int
    groups_per_step: int
    train_s: float
    sync_s: float = 0.0
    tokens_per_s: float = 50.0
    replicas: int = 1
    limit: int = 256


@dataclass(frozen=True)
class SimulatedStep:
    """One step of a simulated run.

    Attributes:
        waited_s: seconds that the trainer waited for its groups.
        ended_s: time of its end, in seconds since the start of the run.
        ages: age of each group: versions between its start and the step's weights.
    """

    waited_s: float
    ended_s: float
    ages: tuple[int, ...]


@dataclass(frozen=True)
class SimulatedRun:
    """A simulated run.

    Attributes:
        steps: steps in order.
        busy: mean share of the engines' sequence slots that were computing.
        dropped: groups that were finished and never trained.
    """

    steps: Sequence[SimulatedStep]
    busy: float
    dropped: int

    @property
    def seconds(self) -> float:
        """Duration of the run in seconds."""
        return self.steps[-1].ended_s if self.steps else 0.0


class _Training:
    """The events of one simulated run."""

    def __init__(self, admission: BaseAdmission, lengths: Callable[[int], Sequence[float]], plan: TrainingPlan) -> None:
        self.plan, self.lengths = plan, lengths
        self.queue: GroupQueue[int, None] = GroupQueue(admission)
        self.window: SlidingWindow[tuple[int, ...]] = SlidingWindow(plan.replicas)
        self.engines = [SimulatedEngine(plan.limit) for _ in range(plan.replicas)]
        for place in range(plan.replicas):
            self.window.open(place, EngineLoad(plan.limit))
        self.steps: list[SimulatedStep] = []
        self.computed_s = 0.0
        self._groups: list[int] = []  # group of each sequence
        self._seconds: list[float] = []
        self._left: dict[int, int] = {}  # sequences of a group that have not ended
        self._submitted = 0
        self._waits_since: float | None = 0.0
        self._due = [-1.0] * plan.replicas
        self._order = itertools.count()
        self._events: list[tuple[float, int, str, int]] = []

    def run(self) -> None:
        """Run to the last step."""
        self._submit()
        self._begin(0.0)
        while len(self.steps) < self.plan.steps:
            now, _, kind, place = heapq.heappop(self._events)
            if kind == "trained":
                self._at(now + self.plan.sync_s, "synced", 0)
            elif kind == "synced":
                self.queue.publish(self.queue.version + 1)
                self.steps[-1:] = [SimulatedStep(self.steps[-1].waited_s, now, self.steps[-1].ages)]
                self._waits_since = now
            else:
                self._finish(place, now)
            self._submit()
            self._begin(now)
            self._take(now)
        # The last taken step still has to be trained.
        last = self.steps[-1]
        end = last.ended_s + self.plan.train_s + self.plan.sync_s
        self.steps[-1] = SimulatedStep(last.waited_s, end, last.ages)

    def _submit(self) -> None:
        """Keep enough tasks waiting for anything that the admission may start."""
        while len(self.queue) < 4 * (self.queue.admission.settings.max_staleness + 1) * self.plan.groups_per_step:
            self.queue.submit([self._submitted])
            self._submitted += 1

    def _begin(self, now: float) -> None:
        """Start the groups that the admission allows, and send sequences to engines with room."""
        for number, task in self.queue.start():
            first = len(self._groups)
            seconds = [length / self.plan.tokens_per_s for length in self.lengths(task)]
            self._groups += [number] * len(seconds)
            self._seconds += seconds
            self._left[number] = len(seconds)
            self.window.submit([(tuple(range(first, first + len(seconds))), len(seconds))])
        for place, sequences in self.window.assign():
            for each in sequences:
                self.computed_s += self._seconds[each]
                self.engines[place].take(each, self._seconds[each], now)
            self._look(place)

    def _finish(self, place: int, now: float) -> None:
        self._due[place] = -1.0
        ended = self.engines[place].finish(now)
        self.window.finish(place, len(ended))
        for sequence in ended:
            group = self._groups[sequence]
            self._left[group] -= 1
            if not self._left[group]:
                del self._left[group]
                self.queue.finish(group, None)
        self._look(place)

    def _look(self, place: int) -> None:
        """Schedule an event for the engine's next end."""
        ends = self.engines[place].ends
        if ends and ends[0][0] != self._due[place]:
            self._due[place] = ends[0][0]
            self._at(ends[0][0], "ended", place)

    def _take(self, now: float) -> None:
        if self._waits_since is None or not (taken := self.queue.take(self.plan.groups_per_step)):
            return
        ages = tuple(self.queue.version - each.version for each in taken)
        self.steps.append(SimulatedStep(now - self._waits_since, now, ages))
        self._waits_since = None
        self._at(now + self.plan.train_s, "trained", 0)

    def _at(self, time: float, kind: str, place: int) -> None:
        heapq.heappush(self._events, (time, next(self._order), kind, place))


def simulate_training(
    admission: BaseAdmission, lengths: Callable[[int], Sequence[float]], plan: TrainingPlan
) -> SimulatedRun:
    """Simulate a run whose engines generate while it trains.

    With ``max_staleness`` 0 in the admission's settings, generation and training alternate.

    Args:
        admission: paces the groups.
        lengths: returns the tokens of each sequence of a prompt, by the prompt's number.
        plan: sizes and speeds.
    """
    run = _Training(admission, lengths, plan)
    run.run()
    seconds = run.steps[-1].ended_s if run.steps else 0.0
    busy = run.computed_s / max(seconds * plan.replicas * plan.limit, 1e-9)
    return SimulatedRun(run.steps, min(busy, 1.0), run.queue.load.dropped)
