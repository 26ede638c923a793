"""The scheduling of requests: one shared queue, and a sliding window of sequences for each replica.

Nothing here waits or reads a clock: the manager calls it between events, and tests call it from a simulation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rollcast.contracts.rollout import EngineLoad

__all__ = ["AdaptiveCap", "SlidingWindow"]

T = TypeVar("T")
#: Usage of the key-value cache above which waiting sequences shrink the window.
_CACHE_HIGH = 0.95
#: Usage of the key-value cache below which the window grows.
_CACHE_LOW = 0.8
_SHRINK = 0.85
#: Fraction of the engine's limit by which the window grows, and below which it never falls.
_STEP = 1 / 16


class AdaptiveCap:
    """Maximum number of sequences in flight on a replica: its engine's limit, or as many as fit its cache.

    A preempted sequence is recomputed from its first token. So the cap falls below the number of running sequences when
    the engine preempts, or when its cache is full and sequences wait; it grows while there is room.

    Args:
        load: first load of the engine.
    """

    def __init__(self, load: EngineLoad) -> None:
        self._preemptions = load.preemptions
        self.value = max(load.limit, 1)

    def update(self, load: EngineLoad) -> None:
        """Adapt the cap to a new load."""
        limit = max(load.limit, 1)
        step = max(int(limit * _STEP), 1)
        preempted, self._preemptions = load.preemptions > self._preemptions, load.preemptions
        if preempted or (load.kv_cache_usage >= _CACHE_HIGH and load.waiting > 0):
            running = min(self.value, load.running or self.value)
            self.value = max(int(running * _SHRINK), step)
        elif load.kv_cache_usage < _CACHE_LOW and load.waiting == 0:
            self.value += step
        self.value = min(self.value, limit)


@dataclass
class _Lane:
    cap: AdaptiveCap | None = None
    in_flight: int = 0
    is_open: bool = False

    def room(self) -> int:
        return self.cap.value - self.in_flight if self.is_open and self.cap is not None else 0


@dataclass
class SlidingWindow(Generic[T]):
    """One queue for all replicas; each takes the next entry as soon as its window has room.

    An entry is a request or a group of requests with one prompt, which stays together: the rest of a group may exceed
    the window, and then waits in the engine's own queue.

    Args:
        count: number of replicas.
        continuous: True if engines add requests to a running batch. Otherwise an idle replica takes an even share of
            the queue, because a request that arrives later would wait for the whole batch.
    """

    count: int
    continuous: bool = True
    _lanes: list[_Lane] = field(init=False)
    _queue: deque[tuple[T, int]] = field(init=False, default_factory=deque)

    def __post_init__(self) -> None:
        self._lanes = [_Lane() for _ in range(self.count)]

    @property
    def in_flight(self) -> list[int]:
        """Sequences in flight, by replica."""
        return [lane.in_flight for lane in self._lanes]

    @property
    def waiting(self) -> int:
        """Number of entries in the queue."""
        return len(self._queue)

    @property
    def caps(self) -> list[int]:
        """Sizes of the open windows."""
        return [lane.cap.value for lane in self._lanes if lane.is_open and lane.cap is not None]

    def open(self, place: int, load: EngineLoad) -> None:
        """Let a replica take entries."""
        self._lanes[place].cap, self._lanes[place].is_open = AdaptiveCap(load), True

    def is_open(self, place: int) -> bool:
        """True if a replica takes entries."""
        return self._lanes[place].is_open

    def close(self, place: int) -> None:
        """Stop a replica from taking entries; the caller finishes or puts back what it has in flight."""
        self._lanes[place].is_open = False

    def hear(self, place: int, load: EngineLoad) -> None:
        """Adapt a replica's window to its engine's load."""
        cap = self._lanes[place].cap
        if cap is not None:
            cap.update(load)

    def submit(self, entries: Iterable[tuple[T, int]]) -> None:
        """Append entries with their numbers of sequences."""
        self._queue.extend(entries)

    def put_back(self, entry: T, sequences: int) -> None:
        """Put an entry at the front, because it has waited before."""
        self._queue.appendleft((entry, sequences))

    def withdraw(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Remove entries from the queue and return them."""
        entries = [entry for entry, _ in self._queue if unwanted(entry)]
        self._queue = deque((entry, size) for entry, size in self._queue if not unwanted(entry))
        return entries

    def occupy(self, place: int, sequences: int) -> None:
        """Count sequences that were sent to a replica past the queue."""
        self._lanes[place].in_flight += sequences

    def finish(self, place: int, sequences: int) -> None:
        """Count sequences that a replica has answered or lost."""
        self._lanes[place].in_flight -= sequences

    def assign(self) -> list[tuple[int, T]]:
        """Remove entries from the queue for replicas with room, emptiest first; return each with its replica."""
        if self.continuous:
            return self._fill({place: lane.room() for place, lane in enumerate(self._lanes)})
        idle = [place for place, lane in enumerate(self._lanes) if lane.room() > 0 and not lane.in_flight]
        if not idle:
            return []
        share = -(-sum(size for _, size in self._queue) // len(idle))
        return self._fill({place: min(share, self._lanes[place].room()) for place in idle})

    def _fill(self, rooms: dict[int, int]) -> list[tuple[int, T]]:
        entries: list[tuple[int, T]] = []
        while self._queue and rooms:
            place = max(rooms, key=lambda lane: (rooms[lane], -self._lanes[lane].in_flight))
            if rooms[place] <= 0:
                break
            entry, sequences = self._queue.popleft()
            rooms[place] -= sequences
            self._lanes[place].in_flight += sequences
            entries.append((place, entry))
        return entries
