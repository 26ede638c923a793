"""Metrics and phase times of the current step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rollcast.contracts.marks import mark

__all__ = ["Recorder"]


class Recorder:
    """Collector of a step's metrics; stages receive it when they are built.

    Args:
        on_phase: called with name, start and end (wall-clock seconds) of each uninterrupted stretch of a phase.
    """

    def __init__(self, on_phase: Callable[[str, float, float], None] | None = None) -> None:
        self._on_phase = on_phase
        self._metrics: dict[str, float] = {}
        self._later: list[Callable[[], Mapping[str, float]]] = []
        self._seconds: dict[str, float] = {}
        self._running: list[tuple[str, float]] = []
        self._is_muted = False

    def record(self, metrics: Mapping[str, float]) -> None:
        """Add metrics; ignored while muted."""
        if not self._is_muted:
            self._metrics.update(metrics)

    def record_later(self, metrics: Callable[[], Mapping[str, float]]) -> None:
        """Add metrics that are computed at the end of the step, because the calls that they need are still running."""
        if not self._is_muted:
            self._later.append(metrics)

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Ignore metrics that are recorded in the block."""
        self._is_muted = True
        try:
            yield
        finally:
            self._is_muted = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block as ``time/<name>_s``, excluding nested phases; profilers show the name."""
        self._stop_clock()
        self._running.append((name, time.perf_counter()))
        try:
            with mark(name):
                yield
        finally:
            self._stop_clock()
            self._running.pop()
            if self._running:
                self._running[-1] = (self._running[-1][0], time.perf_counter())

    def _stop_clock(self) -> None:
        if self._running:
            name, start = self._running[-1]
            seconds = time.perf_counter() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            if self._on_phase is not None:
                now = time.time()
                self._on_phase(name, now - seconds, now)

    def seconds(self, phase: str) -> float:
        """Return the seconds that a phase has taken so far in this step."""
        return self._seconds.get(phase, 0.0)

    def compute(self) -> dict[str, float]:
        """Return the metrics so far in this step, without times; waits for the calls that they need."""
        later, self._later = self._later, []
        for metrics in later:
            self._metrics.update(metrics())
        return dict(self._metrics)

    def take(self) -> dict[str, float]:
        """Return the metrics and ``time/<phase>_s`` of the step, and reset them for the next."""
        row = {**self.compute(), **{f"time/{name}_s": value for name, value in self._seconds.items()}}
        self._metrics, self._seconds = {}, {}
        return row
