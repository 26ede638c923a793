"""The tracker ``report``: report.html, one file that shows a run to people without a network."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollcast.contracts.files import replace_file
from rollcast.contracts.hooks import hookimpl
from rollcast.contracts.tracker import BaseTracker
from rollcast.errors import DataError
from rollcast_report.page import render_page
from rollcast_report.run_data import STATUS_FILE, Status, read_run, read_status, write_status

__all__ = ["REPORT_FILE", "ReportTracker", "write_report"]

REPORT_FILE = "report.html"
_MAX_MESSAGE = 2000


def write_report(run_dir: Path | str, config: Mapping[str, Any] | None = None) -> Path:
    """Write the report of a run from the files in its directory.

    Works on a run that is finished, still running, or was killed at any moment.

    Args:
        run_dir: the run's directory.
        config: the config to show if the directory has no config.yaml.

    Returns:
        The path of the report.

    Raises:
        DataError: if there is no such directory.
        OSError: if the report cannot be written; an older one is then untouched.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise DataError(f"{run_dir} is not a run directory: there is no such folder")
    path = run_dir / REPORT_FILE
    replace_file(path, render_page(read_run(run_dir, config)))
    return path


class ReportTracker(BaseTracker):
    """Keeps report.html up to date: at each validation, and when the run ends in whatever way.

    It reads what the tracker ``jsonl`` writes; without that one the report has no curves.
    It also keeps status.json, from which a later report of a killed run learns how far it was to go.
    """

    def __init__(self, run_dir: Path, config: dict[str, Any], start_step: int = 0) -> None:
        super().__init__(run_dir, config, start_step)
        self._status = Status(state="running", host=socket.gethostname(), pid=os.getpid())
        self._elapsed_before = 0.0
        self._started = time.monotonic()
        for name in (STATUS_FILE, REPORT_FILE):
            if (run_dir / name).is_dir():
                raise DataError(f"{run_dir / name} is a folder; the run writes a file of this name: move it away")

    @hookimpl(trylast=True)
    def on_fit_start(self, trainer: object) -> None:
        """Say that the run is on."""
        if self.start_step > 0:
            self._elapsed_before = self._read_elapsed()
        self._started = time.monotonic()
        self._status.total_steps = getattr(trainer, "total_steps", None)
        self._status.run_name = str(getattr(trainer, "run_name", "") or "")
        self._write()

    # Last, and not at on_validation_end: only now has the tracker jsonl written samples and metrics of the step.
    @hookimpl(trylast=True)
    def on_metrics(self, trainer: object, step: int, metrics: Mapping[str, float]) -> None:
        """Write the report if the step had a validation."""
        if any(name.startswith("val/") for name in metrics):
            self._write()

    @hookimpl(trylast=True)
    def on_exception(self, trainer: object, error: BaseException) -> None:
        """Write the report of a run that ends early."""
        self._end(error)

    @hookimpl(trylast=True)
    def on_fit_end(self, trainer: object, error: BaseException | None) -> None:
        """Write the last report."""
        if error is not None:
            self._end(error)
        elif self._status.state == "running":
            self._status.state = "finished"
            self._write()

    def _read_elapsed(self) -> float:
        """Wall time of the earlier parts of the run, as far as it is known."""
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
            # The error that ended the run is what the user has to see, not what it did to the report.
            self.logger.warning("%s could not be written: %s", self.run_dir / REPORT_FILE, failure)

    def _write(self) -> None:
        self._status.elapsed_s = self._elapsed_before + time.monotonic() - self._started
        write_status(self.run_dir, self._status)
        write_report(self.run_dir, self.config)
