"""Busy times of a process: intervals of its calls, for the run's timeline."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from rollcast import Worker
from rollcast.contracts.marks import add_listener, remove_listener

__all__ = ["BusyClock", "Span", "clipped", "limited", "merged", "start_watch", "stop_watch", "take_spans"]

#: Start and end in wall-clock seconds.
Span: TypeAlias = tuple[float, float]
#: Maximum number of intervals that are kept per name until they are taken.
_MOST_KEPT = 2048


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the intervals in order; those that overlap or touch are joined."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def limited(spans: Iterable[Span], most: int) -> list[Span]:
    """Return at most ``most`` merged intervals, by joining those with the shortest gaps between them."""
    joined = merged(spans)
    if len(joined) <= most:
        return joined
    gaps = sorted(range(1, len(joined)), key=lambda place: joined[place - 1][1] - joined[place][0])
    starts = [0, *sorted(gaps[: most - 1])]
    ends = [*(start - 1 for start in starts[1:]), len(joined) - 1]
    return [(joined[start][0], joined[end][1]) for start, end in zip(starts, ends, strict=True)]


def clipped(spans: Iterable[Span], start: float, end: float) -> list[Span]:
    """Return the parts of the intervals that lie between ``start`` and ``end``."""
    return [(max(start, first), min(end, last)) for first, last in spans if last > start and first < end]


class BusyClock:
    """Recorder of the busy intervals of named blocks, which may nest and may run in several threads.

    The number of intervals per name stays bounded, whatever the number of blocks; see :func:`limited`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, tuple[str, float]] = {}
        self._blocks = 0
        self._ended: dict[str, list[Span]] = {}

    @contextmanager
    def busy(self, name: str) -> Iterator[None]:
        """Record the block under a name."""
        with self._lock:
            self._blocks += 1
            block = self._blocks
            self._open[block] = (name, time.time())
        try:
            yield
        finally:
            with self._lock:
                self._add(*self._open.pop(block))

    def _add(self, name: str, start: float) -> None:
        spans = self._ended.setdefault(name, [])
        spans.append((start, time.time()))
        if len(spans) >= 2 * _MOST_KEPT:
            self._ended[name] = limited(spans, _MOST_KEPT)

    def take(self) -> dict[str, list[Span]]:
        """Return the merged intervals of each name since the last call, including open blocks up to now."""
        with self._lock:
            now = time.time()
            for block, (name, start) in self._open.items():
                self._ended.setdefault(name, []).append((start, now))
                self._open[block] = (name, now)
            seconds, self._ended = self._ended, {}
        return {name: merged(spans) for name, spans in seconds.items()}


class _CallClock(BusyClock):
    """Listener that records the blocks that a host marks as ``role.method``."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Record a marked block if it is a call."""
        if not name.partition(".")[2]:
            yield
            return
        with self.busy(name):
            yield


_clock: _CallClock | None = None


def start_watch(worker: Worker) -> None:  # noqa: ARG001  # called as every function on workers is
    """Start recording this process's calls; drops intervals recorded before."""
    global _clock  # noqa: PLW0603  # one clock per process, which may host the workers of several roles
    if _clock is None:
        _clock = _CallClock()
        add_listener(_clock)
    _clock.take()


def take_spans(worker: Worker) -> dict[str, Sequence[Span]]:  # noqa: ARG001
    """Return the intervals of this process's calls since the last time, by ``role.method``."""
    return {} if _clock is None else dict(_clock.take())


def stop_watch() -> None:
    """Stop recording calls in this process."""
    global _clock  # noqa: PLW0603
    if _clock is not None:
        remove_listener(_clock)
        _clock = None
