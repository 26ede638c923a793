"""Content of a report, read from the files of a run directory.

A report depends on these files alone, so a killed run has one too.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rollcast.contracts.files import replace_file
from rollcast.errors import DataError
from rollcast_report.archive import PageLimits
from rollcast_report.records import Unreadable, read_records
from rollcast_report.samples import SAMPLES_FILE, SavedSamples, read_samples
from rollcast_report.timeline import TIMELINE_FILE, TimelineData, read_timeline
from rollcast_report.trajectories import FOLDER, SavedTrajectories, read_trajectories

__all__ = [
    "PARTS",
    "STATUS_FILE",
    "RunData",
    "Series",
    "Status",
    "hide_secrets",
    "is_alive",
    "read_run",
    "read_status",
    "write_status",
]

STATUS_FILE = "status.json"
#: Types of the values of a status, by the annotations of its fields.
_STATUS_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (float, int),
    "int | None": (int, type(None)),
    "dict[str, float]": (dict,),
    "list[str]": (list,),
}
RECOVERIES_FILE = "recoveries.jsonl"

Series = list[tuple[int, float | None]]
"""(step, value) in order; None where the value was not finite."""

_SECRET = re.compile(
    r"^(?P<key>\s*(?:-\s+)?[\"']?[\w.-]*?(?:api_?key|password|secret|(?:access|auth|hf|api|bearer)_token)[\"']?\s*:)"
    r"[ \t]*(?!null\b|''|\"\"|\$\{)\S.*$",
    re.IGNORECASE | re.MULTILINE,
)


@dataclass
class Status:
    """State of a run, as its report tracker last wrote it.

    Attributes:
        state: ``running``, ``finished``, ``interrupted`` or ``failed``; ``unknown`` without a status file.
        message: reason for a failure.
        run_name: name of the run, set by the trainer.
        step: last step with metrics; None before any.
        metrics: finite metrics of that step.
        total_steps: number of planned steps.
        elapsed_s: wall time in seconds, with the earlier parts of a resumed run.
        host, pid: process that wrote the status.
        command: arguments after ``rollcast`` of the command that started this part of the run; empty if unknown.
        folder: folder in which that command was started.
    """

    state: str = "unknown"
    message: str = ""
    run_name: str = ""
    step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    total_steps: int | None = None
    elapsed_s: float = 0.0
    host: str = ""
    pid: int = 0
    command: list[str] = field(default_factory=list)
    folder: str = ""


@dataclass
class RunData:
    """Content of a report.

    Attributes:
        name: name of the run.
        status: state of the run; ``running`` only if its process is alive.
        series: metric name → steps and values.
        steps: last step; None if nothing was recorded.
        samples: validation samples, a selection that fits a page.
        recoveries: recoveries from lost processes, as the trainer recorded them.
        trajectories: saved trajectories of agents, a selection that fits a page.
        timeline: work of stages and pools over time, a selection that fits a page.
        config: resolved config as text.
        notes: messages about files and lines that could not be read.
    """

    name: str
    status: Status
    series: dict[str, Series] = field(default_factory=dict)
    steps: int | None = None
    samples: SavedSamples = field(default_factory=SavedSamples)
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    trajectories: SavedTrajectories = field(default_factory=SavedTrajectories)
    timeline: TimelineData = field(default_factory=TimelineData)
    config: str = ""
    notes: list[str] = field(default_factory=list)

    def values(self, name: str) -> list[float]:
        """Return the finite values of a metric."""
        return [value for _, value in self.series.get(name, []) if value is not None]


def write_status(run_dir: Path, status: Status) -> None:
    """Replace the status file of a run."""
    replace_file(run_dir / STATUS_FILE, json.dumps(asdict(status), indent=2, ensure_ascii=False) + "\n")


def read_status(run_dir: Path) -> Status:
    """Return the status as it was written; ``unknown`` if there is no file.

    Raises:
        DataError: :func:`write_status` cannot have written the file.
    """
    path = run_dir / STATUS_FILE
    if not path.exists():
        return Status()
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise DataError(f"{path} must hold a JSON object (got {type(data).__name__})")
    known = {item.name for item in fields(Status)}
    status = Status(**{key: value for key, value in data.items() if key in known})
    _require_types(path, status)
    return status


def _require_types(path: Path, status: Status) -> None:
    for item in fields(Status):
        value, kinds = getattr(status, item.name), _STATUS_TYPES[str(item.type)]
        if not isinstance(value, kinds) or isinstance(value, bool):
            allowed = " or ".join(kind.__name__ for kind in kinds)
            raise DataError(f"{path}: {item.name} must be {allowed} (got {value!r:.60})")
    if not math.isfinite(status.elapsed_s):
        raise DataError(f"{path}: elapsed_s is {status.elapsed_s}")


def is_alive(status: Status) -> bool:
    """Return True if the process that wrote a ``running`` status may still live."""
    if status.host != socket.gethostname():
        return False
    if status.pid == os.getpid():
        return True
    if os.name != "posix" or status.pid <= 0:  # on other systems signal 0 may end the process
        return False
    try:
        os.kill(status.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process lives and belongs to another user
        return True
    return True


PARTS = ("metrics", "samples", "recoveries", "trajectories", "timeline")


def read_run(
    run_dir: Path,
    config: Mapping[str, Any] | None = None,
    parts: Collection[str] = PARTS,
    limits: PageLimits | None = None,
) -> RunData:
    """Read the files of a run directory; any of them may be missing.

    Args:
        run_dir: directory of the run.
        config: config to show if there is no config.yaml.
        parts: files to read in addition to status and config; names in ``PARTS``.
        limits: limits for samples and trajectories.
    """
    notes = []
    try:
        status = read_status(run_dir)
    except DataError as error:  # curves are shown without a status too
        status = Status()
        notes.append(str(error))
    if status.state == "running" and not is_alive(status):
        status.state = "interrupted"
    run = RunData(name=status.run_name or run_dir.resolve().name, status=status, notes=notes)
    readers: dict[str, Callable[[], None]] = {
        "metrics": lambda: _read_metrics(run_dir / "metrics.jsonl", run),
        "samples": lambda: _read_samples(run_dir, run, limits),
        "recoveries": lambda: _read_recoveries(run_dir / RECOVERIES_FILE, run),
        "trajectories": lambda: _read_trajectories(run_dir, run, limits),
        "timeline": lambda: _read_timeline(run_dir, run),
    }
    for part in parts:
        readers[part]()
    run.config = _read_config(run_dir, config)
    return run


def _read_metrics(path: Path, run: RunData) -> None:
    unreadable: list[Unreadable] = []
    for _, record in read_records(path):
        if isinstance(record, Unreadable):
            unreadable.append(record)
            continue
        step = record["step"]
        run.steps = step if run.steps is None else max(run.steps, step)
        for key, value in record.items():
            if key == "step" or not (value is None or isinstance(value, int | float)):
                continue
            finite = None if value is None or not math.isfinite(value) else float(value)
            run.series.setdefault(key, []).append((step, finite))
    _note(path, unreadable, run)


def _read_samples(run_dir: Path, run: RunData, limits: PageLimits | None) -> None:
    run.samples = read_samples(run_dir / SAMPLES_FILE, limits)
    _note_lines(SAMPLES_FILE, run.samples.unreadable, run)


def _read_recoveries(path: Path, run: RunData) -> None:
    unreadable: list[Unreadable] = []
    for _, record in read_records(path):
        if isinstance(record, Unreadable):
            unreadable.append(record)
        else:
            run.recoveries.append(record)
    _note(path, unreadable, run)


def _read_trajectories(run_dir: Path, run: RunData, limits: PageLimits | None) -> None:
    versions = {step: value for step, value in run.series.get("rollout/weight_version", []) if value is not None}
    run.trajectories = read_trajectories(run_dir, limits, versions)
    for name, lines in run.trajectories.unreadable.items():
        _note_lines(f"{FOLDER}/{name}", lines, run)


def _read_timeline(run_dir: Path, run: RunData) -> None:
    run.timeline = read_timeline(run_dir / TIMELINE_FILE)
    _note_lines(TIMELINE_FILE, run.timeline.unreadable, run)


def _note(path: Path, unreadable: list[Unreadable], run: RunData) -> None:
    _note_lines(path.name, [item.line for item in unreadable if not item.torn], run)


def _note_lines(name: str, lines: list[int], run: RunData) -> None:
    if lines:
        more = ", …" if len(lines) > 10 else ""
        run.notes.append(f"{name}: {len(lines)} unreadable (line {', '.join(map(str, lines[:10]))}{more})")


def _read_config(run_dir: Path, config: Mapping[str, Any] | None) -> str:
    path = run_dir / "config.yaml"
    if path.exists():
        text = path.read_text("utf-8", "replace")
    else:
        text = json.dumps(config, indent=2, ensure_ascii=False, default=str) if config else ""
    return hide_secrets(text)


def hide_secrets(text: str) -> str:
    """Return config text without keys and passwords, because people send reports to others."""
    return _SECRET.sub(r"\g<key> (hidden)", text)
