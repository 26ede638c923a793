"""Simulated engines and a simulated trainer on a simulated clock, for tests of scheduling and for predictions."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from rollcast.contracts.rollout import EngineLoad
from rollcast_serving.contracts.admission import BaseAdmission
from rollcast_serving.scheduling import SlidingWindow
from rollcast_serving.service import GroupQueue

__all__ = [
    "SimulatedEngine",
    "SimulatedRun",
    "SimulatedStep",
    "TimedEngine",
    "TimedTrainer",
    "TrainingPlan",
    "TrainingSimulation",
    "ideal_makespan",
    "simulate_training",
    "simulate_window",
]


class TimedEngine(Protocol):
    """An engine on a simulated clock; times are in seconds."""

    @property
    def limit(self) -> int:
        """Number of sequences computed at once."""

    @property
    def next_end(self) -> float | None:
        """Time of the next end of a sequence if nothing else happens before; None if nothing is under way."""

    def take(self, number: int, length: float, now: float) -> None:
        """Start a sequence of ``length`` tokens, or let it wait."""

    def finish(self, now: float) -> list[int]:
        """End the sequences that are due, start those that wait, and return the ended ones' numbers."""


class TimedTrainer(Protocol):
    """A trainer on a simulated clock; times are in seconds."""

    def train(self, now: float, tasks: Sequence[int]) -> float:
        """Begin to train the groups of these tasks; return the time of its end."""

    def sync(self, now: float) -> float:
        """Begin a weight sync; return the time of its end."""


@dataclass
class SimulatedEngine:
    """An engine that computes up to ``limit`` sequences at once, all at the same speed.

    Attributes:
        limit: number of sequences computed at once.
        tokens_per_s: tokens of each sequence per unit of time.
        ends: heap of the end times of running sequences, with their numbers.
        queue: numbers and lengths of waiting sequences.
    """

    limit: int
    tokens_per_s: float = 1.0
    ends: list[tuple[float, int]] = field(default_factory=list)
    queue: deque[tuple[int, float]] = field(default_factory=deque)

    @property
    def next_end(self) -> float | None:
        """Time of the next end; None if nothing is under way."""
        return self.ends[0][0] if self.ends else None

    def take(self, number: int, length: float, now: float) -> None:
        """Start a sequence of ``length`` tokens, or queue it."""
        if len(self.ends) < self.limit:
            heapq.heappush(self.ends, (now + length / self.tokens_per_s, number))
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
    window.submit((member, len(member)) for member in groups)
    due = [-1.0] * replicas  # time of the next end that is already scheduled
    order = itertools.count()  # keeps events of equal time in the order of their creation
    events: list[tuple[float, int, str, int, tuple[int, ...]]] = []

    def at(time: float, kind: str, place: int, what: tuple[int, ...] = ()) -> None:
        heapq.heappush(events, (time, next(order), kind, place, what))

    def send(time: float) -> None:
        for place, job in window.assign():
            at(time + latency, "arrive", place, job)

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
        end = engine.next_end
        if end is not None and end != due[place]:
            due[place] = end
            at(end, "end", place)
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


@dataclass(frozen=True)
class _SteadyTrainer:
    """A trainer whose steps take the same time each."""

    plan: TrainingPlan

    def train(self, now: float, tasks: Sequence[int]) -> float:
        """Return the end of the training."""
        return now + self.plan.train_s

    def sync(self, now: float) -> float:
        """Return the end of the weight sync."""
        return now + self.plan.sync_s


class TrainingSimulation:
    """A simulated run: groups that an admission paces, engines that generate them and a trainer that takes them.

    Args:
        admission: paces the groups; with ``max_staleness`` 0, generation and training take turns.
        lengths: returns the tokens of each sequence of a prompt, by the prompt's number.
        engines: generate; they share one queue, from which each takes a group as soon as it has room.
        trainer: says how long a step takes.
    """

    def __init__(
        self,
        admission: BaseAdmission,
        lengths: Callable[[int], Sequence[float]],
        engines: Sequence[TimedEngine],
        trainer: TimedTrainer,
    ) -> None:
        self.lengths, self.engines, self.trainer = lengths, engines, trainer
        self.queue: GroupQueue[int, None] = GroupQueue(admission)
        self.window: SlidingWindow[tuple[int, ...]] = SlidingWindow(len(engines))
        for place, engine in enumerate(engines):
            self.window.open(place, EngineLoad(engine.limit))
        #: Steps so far, in order.
        self.steps: list[SimulatedStep] = []
        #: Tokens of the sequences that were sent to an engine.
        self.tokens = 0.0
        self._groups: list[int] = []  # group of each sequence
        self._tasks: list[int] = []  # prompt of each sequence
        self._lengths: list[float] = []
        self._left: dict[int, int] = {}  # sequences of a group that have not ended
        self._submitted = 0
        self._waits_since: float | None = 0.0
        self._due: list[float | None] = [None] * len(engines)
        self._order = itertools.count()
        self._events: list[tuple[float, int, str, int]] = []

    def run(self, steps: int) -> None:
        """Run until ``steps`` steps have been trained and their weights sent.

        Args:
            steps: number of steps, 1 or more.
        """
        trained = 0
        self._submit()
        self._begin(0.0)
        while trained < steps:
            now, _, kind, place = heapq.heappop(self._events)
            if kind == "trained":
                self._at(self.trainer.sync(now), "synced", 0)
                for engine in range(len(self.engines)):  # a sync may hold up what is under way
                    self._look(engine)
            elif kind == "synced":
                trained += 1
                self.queue.publish(self.queue.version + 1)
                self.steps[-1] = replace(self.steps[-1], ended_s=now)
                self._waits_since = now
            else:
                self._finish(place, now)
            if trained < steps:
                self._submit()
                self._begin(now)
                self._take(now)

    def task_of(self, sequence: int) -> int:
        """Return the number of the prompt of a sequence that an engine was given."""
        return self._tasks[sequence]

    def _submit(self) -> None:
        """Keep enough tasks waiting for anything that the admission may start."""
        settings = self.queue.admission.settings
        while len(self.queue) < 4 * (settings.max_staleness + 1) * settings.groups_per_step:
            self.queue.submit([self._submitted])
            self._submitted += 1

    def _begin(self, now: float) -> None:
        """Start the groups that the admission allows, and send sequences to engines with room."""
        for number, task in self.queue.start():
            first, lengths = len(self._groups), self.lengths(task)
            self._groups += [number] * len(lengths)
            self._tasks += [task] * len(lengths)
            self._lengths += lengths
            self._left[number] = len(lengths)
            self.window.submit([(tuple(range(first, first + len(lengths))), len(lengths))])
        for place, sequences in self.window.assign():
            for sequence in sequences:
                self.tokens += self._lengths[sequence]
                self.engines[place].take(sequence, self._lengths[sequence], now)
            self._look(place)

    def _finish(self, place: int, now: float) -> None:
        if self._due[place] != now:
            return  # the end that this event stood for has moved
        self._due[place] = None
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
        end = self.engines[place].next_end
        if end is not None and end != self._due[place]:
            self._at(end, "ended", place)
        self._due[place] = end

    def _take(self, now: float) -> None:
        settings = self.queue.admission.settings
        if self._waits_since is None or not (groups := self.queue.take(settings.groups_per_step)):
            return
        ages = tuple(self.queue.version - group.version for group in groups)
        self.steps.append(SimulatedStep(now - self._waits_since, now, ages))
        self._waits_since = None
        self._at(self.trainer.train(now, [group.task for group in groups]), "trained", 0)

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
    engines = [SimulatedEngine(plan.limit, plan.tokens_per_s) for _ in range(plan.replicas)]
    run = TrainingSimulation(admission, lengths, engines, _SteadyTrainer(plan))
    run.run(plan.steps)
    seconds = run.steps[-1].ended_s if run.steps else 0.0
    slots = plan.replicas * plan.limit * plan.tokens_per_s
    return SimulatedRun(run.steps, min(run.tokens / max(seconds * slots, 1e-9), 1.0), run.queue.load.dropped)
