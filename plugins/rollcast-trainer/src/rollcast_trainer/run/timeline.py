"""The timeline of a run: when each stage of a step and the processes of each pool were busy (``timeline.jsonl``)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollcast import WorkerGroup
from rollcast_report.records import RecordWriter, check_records
from rollcast_trainer.workers.busy import BusyClock, Span, clipped, limited, merged, start_watch, take_spans
from rollcast_trainer.workers.roles import Role, is_served

__all__ = ["TIMELINE_FILE", "Timeline", "TimelineWriter", "check_timeline"]

logger = logging.getLogger(__name__)
#: File in the run directory with one JSON line per step.
TIMELINE_FILE = "timeline.jsonl"
#: Maximum number of intervals of a stage in a line.
_MOST_SPANS = 64
#: Decimal places of seconds in the file.
_DECIMALS = 4
#: Phase of a step, as in ``time/<phase>_s``, by the worker method that it calls.
_PHASES = {
    "generate_sequences": "generate",
    "compute_rm_score": "reward",
    "score": "reward",
    "compute_log_prob": "old_log_prob",
    "compute_ref_log_prob": "ref_log_prob",
    "compute_values": "values",
}
#: Calls that only query the workers; they do not count as work.
_QUESTIONS = frozenset({"run_function", "query_mesh"})


class Timeline:
    """Collector of the busy intervals of stages and pools since the last line.

    Consecutive lines leave no gap: each covers the time since the end of the previous one. Times come from the
    machines' wall clocks.

    Args:
        pool_of: returns the name of the pool of a role.
    """

    def __init__(self, pool_of: Callable[[str], str]) -> None:
        self._pool_of = pool_of
        self._groups: list[WorkerGroup] = []
        self._stages: dict[str, list[Span]] = {}
        #: Clocks of replicas, by role.
        self._replicas: dict[str, BusyClock] = {}
        self._began = time.time()

    def watch(self, groups: Mapping[str, WorkerGroup]) -> None:
        """Record calls on the workers of these groups from now on.

        Args:
            groups: worker groups by role.
        """
        # Roles of one pool share its processes, which are queried once. Replicas compute in child processes, which the
        # trainer times itself.
        self._groups = list({group.name: group for role, group in groups.items() if not is_served(role)}.values())
        self._replicas = {role: BusyClock() for role in groups if is_served(role)}
        for group in self._groups:
            group.execute_func(start_watch)
        self._began = time.time()

    def add_stage(self, name: str, start: float, end: float) -> None:
        """Add an interval that the trainer spent in a stage."""
        self._stages.setdefault(name, []).append((start, end))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Record a block of the trainer's time as a stage."""
        start = time.time()
        try:
            yield
        finally:
            self.add_stage(name, start, time.time())

    @contextmanager
    def replicas_busy(self, stage: str, role: str = Role.ROLLOUT) -> Iterator[None]:
        """Record a block in which the replicas of a role generate; does nothing without such replicas. Thread-safe."""
        clock = self._replicas.get(role)
        if clock is None:
            yield
            return
        with clock.busy(stage):
            yield

    def take(self) -> dict[str, Any]:
        """Return the line for the time since the previous one, and start the next.

        Returns:
            ``began`` in seconds since 1970, ``seconds``, ``stages`` (stage → intervals) and ``pools`` (pool →
            ``busy_s`` and ``calls``, stage → intervals). An interval is a pair of seconds after ``began``.
        """
        pools = self._pool_spans()
        began, ended = self._began, time.time()
        self._began = ended
        stages, self._stages = self._stages, {}

        def shown(spans: Iterable[Span]) -> list[list[float]]:
            drawn = limited(clipped(spans, began, ended), _MOST_SPANS)
            return [[round(start - began, _DECIMALS), round(end - began, _DECIMALS)] for start, end in drawn]

        return {
            "began": round(began, 3),
            "seconds": round(ended - began, _DECIMALS),
            "stages": {name: shown(spans) for name, spans in stages.items()},
            "pools": {
                pool: {
                    "busy_s": round(_busy_seconds(calls.values(), began, ended), _DECIMALS),
                    "calls": {stage: shown(spans) for stage, spans in calls.items()},
                }
                for pool, calls in pools.items()
            },
        }

    def _pool_spans(self) -> dict[str, dict[str, list[Span]]]:
        """Return pool → stage → intervals of its processes, including idle pools."""
        pools: dict[str, dict[str, list[Span]]] = {}
        for group in self._groups:
            for role in group.roles:
                pools.setdefault(self._pool_of(role), {})
            for rank in group.execute_func(take_spans):
                for call, spans in rank.items():
                    role, _, method = call.partition(".")
                    if method not in _QUESTIONS:
                        stage = _PHASES.get(method, method)
                        pools.setdefault(self._pool_of(role), {}).setdefault(stage, []).extend(spans)
        for role, clock in self._replicas.items():
            calls = pools.setdefault(self._pool_of(role), {})
            for stage, spans in clock.take().items():
                calls.setdefault(stage, []).extend(spans)
        return pools


def _busy_seconds(calls: Iterable[Sequence[Span]], began: float, ended: float) -> float:
    everything = clipped((span for spans in calls for span in spans), began, ended)
    return sum(end - start for start, end in merged(everything))


def check_timeline(run_dir: Path, start_step: int) -> None:
    """Check that a run that resumes from ``start_step`` can append to the timeline, without changing it.

    Raises:
        DataError: the path is not a regular file, or one of its lines cannot be read.
    """
    check_records(run_dir / TIMELINE_FILE, start_step)


class TimelineWriter:
    """Writer of ``timeline.jsonl``; a resumed run drops the lines that it will write again.

    Args:
        run_dir: run directory.
        start_step: step that the run resumes from.

    Raises:
        DataError: the file of the earlier run cannot be continued.
    """

    def __init__(self, run_dir: Path, start_step: int) -> None:
        self._path = run_dir / TIMELINE_FILE
        self._file: RecordWriter | None = RecordWriter(self._path, start_step)

    def append(self, step: int, line: Mapping[str, Any]) -> None:
        """Append the line of a step; after a write error, warn and stop writing."""
        if self._file is None:
            return
        try:
            self._file.append(step, line)
        except OSError as error:
            # A write error of the timeline must not end the run.
            logger.warning("%s cannot be written and is not continued: %s", self._path, error)
            self.close()

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None
