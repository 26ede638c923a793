"""Reader that follows a run from another process by its files, with the alarms that they call for."""

from __future__ import annotations

import math
import socket
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollcast.contracts.command import format_clock
from rollcast.errors import DataError
from rollcast_report.records import parse_record
from rollcast_report.resume import resume_command
from rollcast_report.run_data import STATUS_FILE, Status, is_alive, read_status
from rollcast_report.timeline import TIMELINE_FILE

__all__ = ["Follower", "Frame"]

METRICS_FILE = "metrics.jsonl"
_WARM_START = "warm_start"
#: Steps whose values are kept for the curves and medians.
_KEPT = 400
#: A run is late after this many median steps, and after as many seconds.
_LATE_STEPS, _LATE_S = 5.0, 300.0


@dataclass
class Frame:
    """State of a run at one moment.

    Attributes:
        name: name of the run.
        state: ``starting``, ``running``, ``finished``, ``interrupted``, ``failed`` or ``unknown``.
        status: status as the run wrote it.
        step: last step with metrics; None before any.
        metrics: last value of each metric; ``time/`` of the last step only.
        validated: step and ``val/`` metrics of the last validation.
        series: metric → values of the last steps, in order.
        step_s: median seconds of the last 20 steps; None if unknown.
        idle_s: seconds since the run last wrote a file.
        alarms: problems of the run, as sentences.
        command: command that resumes the run; None while it runs and after its end.
    """

    name: str
    state: str
    status: Status
    step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    validated: tuple[int, dict[str, float]] | None = None
    series: dict[str, Sequence[float]] = field(default_factory=dict)
    step_s: float | None = None
    idle_s: float | None = None
    alarms: list[str] = field(default_factory=list)
    command: str | None = None

    @property
    def remaining_s(self) -> float | None:
        """Estimated seconds until the last step; None if unknown or not running."""
        total = self.status.total_steps
        if self.state != "running" or self.step_s is None or not total:
            return None
        seconds = max(0, total - (self.step or 0)) * self.step_s
        return seconds if math.isfinite(seconds) else None


class Follower:
    """A reader of a run directory that reads only what is new since the last call.

    Args:
        run_dir: directory of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._warm_start: Follower | None = None
        self._forget()

    def _forget(self, inode: int = 0) -> None:
        self._offset = 0
        self._inode = inode
        self._step: int | None = None
        self._metrics: dict[str, float] = {}
        self._missing: list[str] = []
        self._validated: tuple[int, dict[str, float]] | None = None
        self._series: dict[str, deque[float]] = {}

    def read(self) -> Frame:
        """Return the state of the run now; while it trains its warm start, that of the warm start.

        Raises:
            DataError: the folder is no run directory.
        """
        if not self.run_dir.is_dir():
            raise DataError(f"{self.run_dir} is no run directory: there is no such folder")
        self._read_metrics()
        notes: list[str] = []
        try:
            status = read_status(self.run_dir)
        except DataError as error:
            status = Status()
            notes.append(str(error))
        frame = Frame(
            name=status.run_name or self.run_dir.resolve().name,
            state=self._state(status),
            status=status,
            step=self._step,
            metrics=dict(self._metrics),
            validated=self._validated,
            series={name: list(values) for name, values in self._series.items()},
            step_s=self._step_seconds(),
            idle_s=self._idle_seconds(),
        )
        if frame.state == "starting" and (self.run_dir / _WARM_START).is_dir():
            self._warm_start = self._warm_start or Follower(self.run_dir / _WARM_START)
            earlier = self._warm_start.read()
            if earlier.state == "running":
                earlier.name = f"{frame.name}: warm start"
                return earlier
        frame.alarms = notes + self._alarms(frame)
        if frame.state in ("interrupted", "failed"):
            frame.command = resume_command(status)
        return frame

    def _state(self, status: Status) -> str:
        if status.state == "running":
            # The process of a run on another machine cannot be asked; its files tell whether it goes on.
            is_here = status.host == socket.gethostname()
            return "interrupted" if is_here and not is_alive(status) else "running"
        if status.state == "unknown" and (self.run_dir / ".lock").exists() and self._step is None:
            return "starting"
        return status.state

    def _read_metrics(self) -> None:
        path = self.run_dir / METRICS_FILE
        try:
            status = path.stat()
        except FileNotFoundError:
            return
        if status.st_ino != self._inode or status.st_size < self._offset:  # a run that resumed wrote the file anew
            self._forget(status.st_ino)
        with path.open("rb") as file:
            file.seek(self._offset)
            for raw in file:
                if not raw.endswith(b"\n"):
                    break  # the rest of the line comes later
                self._offset += len(raw)
                record = parse_record(raw)
                if record is not None:
                    self._take(record)

    def _take(self, record: dict[str, Any]) -> None:
        self._step = record["step"]
        values = {name: value for name, value in record.items() if name != "step" and _is_number(value)}
        self._missing = [name for name, value in record.items() if value is None]
        validation = {name: float(value) for name, value in values.items() if name.startswith("val/")}
        if validation:
            self._validated = (record["step"], validation)
        # A phase that this step did not have, such as a validation, took no time in it.
        self._metrics = {name: value for name, value in self._metrics.items() if not name.startswith("time/")}
        for name, value in values.items():
            self._metrics[name] = float(value)
            self._series.setdefault(name, deque(maxlen=_KEPT)).append(float(value))

    def _step_seconds(self) -> float | None:
        recent = list(self._series.get("time/step_s", ()))[-20:]
        return statistics.median(recent) if recent else None

    def _idle_seconds(self) -> float | None:
        times = []
        for name in (STATUS_FILE, METRICS_FILE, TIMELINE_FILE, ".lock"):
            try:
                times.append((self.run_dir / name).stat().st_mtime)
            except OSError:
                continue
        return max(0.0, time.time() - max(times)) if times else None

    def _alarms(self, frame: Frame) -> list[str]:
        alarms = []
        status = frame.status
        if status.state == "running" and frame.state == "interrupted":
            alarms.append(f"the process {status.pid} of the run is gone, without a word")
        limit = max(_LATE_S, _LATE_STEPS * (frame.step_s or 0.0))
        if frame.state in ("running", "starting") and frame.idle_s is not None and frame.idle_s > limit:
            usual = "" if frame.step_s is None else f"; a step takes {format_clock(frame.step_s)}"
            alarms.append(f"no sign of life for {format_clock(frame.idle_s)}{usual}")
        if status.state == "failed" and status.message:
            alarms.append(status.message)
        if self._missing:
            alarms.append(f"not finite in step {self._step}: {', '.join(self._missing[:5])}")
        if frame.metrics.get("actor/skipped_steps", 0.0) > 0:
            share = frame.metrics["actor/skipped_steps"]
            alarms.append(f"{share:.0%} of the updates of step {self._step} were skipped: a gradient was not finite")
        if frame.metrics.get("reward/errors", 0.0) > 0:
            alarms.append(f"{frame.metrics['reward/errors']:.0f} rewards of step {self._step} failed")
        return alarms


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
