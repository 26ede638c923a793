"""The tracker ``jsonl``: metrics.jsonl and samples.jsonl in the run's directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollcast.contracts.hooks import hookimpl
from rollcast.contracts.tracker import BaseTracker
from rollcast_report.records import RecordWriter, check_records

__all__ = ["METRICS_FILE", "SAMPLES_FILE", "JsonlTracker"]

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"


class JsonlTracker(BaseTracker):
    """A tracker that writes one JSON object per step and per validation sample.

    Every line is complete and passed to the operating system before the hook returns. A resumed run
    first drops the lines that it will write again, so its files equal those of an uninterrupted run.
    A number that is not finite is written as null.

    Raises:
        DataError: a file of an earlier run cannot be read or continued.
        OSError: a hook cannot write; names the file.
    """

    def __init__(self, run_dir: Path, config: dict[str, Any], start_step: int = 0) -> None:
        super().__init__(run_dir, config, start_step)
        self._writers: dict[str, RecordWriter] = {}
        for name in (METRICS_FILE, SAMPLES_FILE):
            check_records(run_dir / name, start_step)

    @hookimpl
    def on_fit_start(self, trainer: object) -> None:
        """Drop the lines that an interrupted run wrote after the step that this run continues from."""
        self._writer(METRICS_FILE)
        self._writer(SAMPLES_FILE)

    @hookimpl
    def on_metrics(self, trainer: object, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of one step."""
        self._writer(METRICS_FILE).append(step, metrics)

    @hookimpl
    def on_validation_end(
        self, trainer: object, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]]
    ) -> None:
        """Append the samples of one validation."""
        writer = self._writer(SAMPLES_FILE)
        for sample in samples:
            writer.append(step, sample)

    @hookimpl
    def on_checkpoint_saved(self, trainer: object, step: int, path: Path) -> None:
        """Synchronize the files with the disk: a run resumed from this checkpoint does not write these lines again."""
        for writer in self._writers.values():
            writer.sync()

    def close(self) -> None:
        """Close both files."""
        for writer in self._writers.values():
            writer.close()

    def _writer(self, name: str) -> RecordWriter:
        if name not in self._writers:
            writer = RecordWriter(self.run_dir / name, self.start_step)
            if writer.dropped:
                self.logger.info("dropped %d lines after step %d from %s", writer.dropped, self.start_step, writer.path)
            self._writers[name] = writer
        return self._writers[name]
