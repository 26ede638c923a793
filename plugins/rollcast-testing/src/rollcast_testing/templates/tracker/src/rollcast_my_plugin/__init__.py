"""The tracker ``my_plugin``: one metric of each step as a line of a CSV file."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollcast.contracts.hooks import hookimpl
from rollcast.contracts.tracker import BaseTracker


class MyPlugin(BaseTracker):
    """Writes ``my_plugin.csv`` into the run directory.

    Args:
        metric: name of the metric.
    """

    def __init__(self, run_dir: Path, config: dict[str, Any], start_step: int = 0, metric: str = "reward/mean") -> None:
        super().__init__(run_dir, config, start_step)
        self.metric = metric
        self.path = run_dir / "my_plugin.csv"
        lines = self.path.read_text().splitlines() if self.path.is_file() else []
        # An interrupted run may have gone on after the checkpoint that this one continues from.
        earlier = [line for line in lines if int(line.partition(",")[0]) <= start_step]
        self.path.write_text("".join(f"{line}\n" for line in earlier))

    @hookimpl
    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.metric in metrics:
            with self.path.open("a", newline="") as file:
                csv.writer(file, lineterminator="\n").writerow([step, metrics[self.metric]])
