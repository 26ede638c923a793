"""Replicas of simulated engines on a simulated clock, for tests and benchmarks of the order of requests."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollcast.contracts.rollout import EngineLoad
from rollcast_serving.scheduling import SlidingWindow

__all__ = ["SimulatedEngine", "ideal_makespan", "simulate_window"]


@dataclass
class SimulatedEngine:
    """An engine that computes up to ``limit`` sequences at once, one token of each in one unit of time.

    Attributes:
        limit: number of sequences computed at once.
        ends: end times of those under way, with their numbers; a heap.
        queue: numbers and lengths of sequences that wait.
    """

    limit: int
    ends: list[tuple[float, int]] = field(default_factory=list)
    queue: deque[tuple[int, float]] = field(default_factory=deque)

    def take(self, number: int, length: float, now: float) -> None:
        """Start a sequence, or let it wait."""
        if len(self.ends) < self.limit:
            heapq.heappush(self.ends, (now + length, number))
        else:
            self.queue.append((number, length))

    def finish(self, now: float) -> list[int]:
        """End the sequences that are due, start those that wait, and return the ended ones' numbers."""
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
    """Return the time until all sequences have ended with the sliding window of the server manager.

    Args:
        lengths: tokens of each sequence, in the queue's order.
        replicas: number of engines.
        limit: number of sequences that an engine computes at once.
        group: number of sequences of a prompt, which stay together.
        latency: time of a message to or from a replica.
    """
    window: SlidingWindow[tuple[int, ...]] = SlidingWindow(replicas)
    engines = [SimulatedEngine(limit) for _ in range(replicas)]
    for place in range(replicas):
        window.open(place, EngineLoad(limit))
    numbers = list(range(len(lengths)))
    groups = [tuple(numbers[start : start + group]) for start in range(0, len(numbers), group)]
    window.submit((each, len(each)) for each in groups)
    due = [-1.0] * replicas  # time of the next end that is among the events
    order = itertools.count()  # events of one moment keep the order in which they were made
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
