"""The tracker ``report``, which writes report.html, a single file that shows a run and works offline."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollcast.contracts.command import read_command
from rollcast.contracts.files import replace_file
from rollcast.contracts.hooks import hookimpl
from rollcast.contracts.tracker import BaseTracker
from rollcast.errors import DataError
from rollcast_report.archive import PageLimits
from rollcast_report.page import render_page
from rollcast_report.run_data import STATUS_FILE, Status, read_run, read_status, write_status

__all__ = ["REPORT_FILE", "ReportTracker", "write_report"]

REPORT_FILE = "report.html"
_MAX_MESSAGE = 2000


def write_report(
    run_dir: Path | str,
    config: Mapping[str, Any] | None = None,
    limits: PageLimits | None = None,
    output: Path | None = None,
) -> Path:
    """Write the report of a run from the files in its directory.

    The run may be finished, still running, or killed at any moment.

    Args:
        run_dir: directory of the run.
        config: config to show if the directory has no config.yaml.
        limits: limits for samples and trajectories.
        output: file to write; ``report.html`` in the directory by default.

    Returns:
        Path of the report.

    Raises:
        DataError: there is no such directory.
        OSError: the report cannot be written; an older report is unchanged.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise DataError(f"{run_dir} is not a run directory: there is no such folder")
    path = output or run_dir / REPORT_FILE
    replace_file(path, render_page(read_run(run_dir, config, limits=limits)))
    return path


class ReportTracker(BaseTracker):
    """A tracker that writes report.html at each validation and at the end of the run, however the run ends.

    The report is made from the files of the tracker ``jsonl``; without that tracker it has no curves.
    This tracker also writes status.json at each step, which shows how far the run is; a later report of a killed run
    reads the number of planned steps from it.
    """

    def __init__(self, run_dir: Path, config: dict[str, Any], start_step: int = 0) -> None:
        super().__init__(run_dir, config, start_step)
        command, folder = read_command()
        self._status = Status(
            state="running", host=socket.gethostname(), pid=os.getpid(), command=command, folder=folder
        )
        self._elapsed_before = 0.0
        self._started = time.monotonic()
        for name in (STATUS_FILE, REPORT_FILE):
            if (run_dir / name).is_dir():
                raise DataError(f"{run_dir / name} is a folder; the run writes a file of this name: move it away")

    @hookimpl(trylast=True)
    def on_fit_start(self, trainer: object) -> None:
        """Write status and report of a running run."""
        if self.start_step > 0:
            self._elapsed_before = self._read_elapsed()
        self._started = time.monotonic()
        self._status.total_steps = getattr(trainer, "total_steps", None)
        self._status.run_name = str(getattr(trainer, "run_name", "") or "")
        self._write()

    # Not in on_validation_end: the tracker jsonl has written the step's samples and metrics only after this hook.
    @hookimpl(trylast=True)
    def on_metrics(self, trainer: object, step: int, metrics: Mapping[str, float]) -> None:
        """Write the status, and the report if the step had a validation."""
        self._status.step = step
        self._status.metrics = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        if any(name.startswith("val/") for name in metrics):
            self._write()
        else:
            self._write_status()

    @hookimpl(trylast=True)
    def on_exception(self, trainer: object, error: BaseException) -> None:
        """Write the report of a run that ended with an error."""
        self._end(error)

    @hookimpl(trylast=True)
    def on_fit_end(self, trainer: object, error: BaseException | None) -> None:
        """Write the final report."""
        if error is not None:
            self._end(error)
        elif self._status.state == "running":
            self._status.state = "finished"
            self._write()

    def _read_elapsed(self) -> float:
        """Return the wall time of the earlier parts of the run in seconds; 0 if it is not known."""
        try:
            return read_status(self.run_dir).elapsed_s
        except DataError as error:
            self.logger.warning("%s; the report counts the time of this part of the run only", error)
            return 0.0

    def _end(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            self._status.state, self._status.message = "interrupted", ""
        else:
            self._status.state = "failed"
            self._status.message = f"{type(error).__name__}: {error}"[:_MAX_MESSAGE]
        try:
            self._write()
        except OSError as failure:
            # The user has to see the error that ended the run, not a later one of the report.
            self.logger.warning("%s could not be written: %s", self.run_dir / REPORT_FILE, failure)

    def _write(self) -> None:
        self._write_status()
        # While the run goes on it waits for the page, so that one is smaller.
        limits = PageLimits.live() if self._status.state == "running" else PageLimits()
        write_report(self.run_dir, self.config, limits)

    def _write_status(self) -> None:
        self._status.elapsed_s = self._elapsed_before + time.monotonic() - self._started
        write_status(self.run_dir, self._status)
