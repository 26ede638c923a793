"""The trackers pass the suite that third parties are given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rollcast.contracts.tracker import trackers
from rollcast_testing import TrackerSuite


class TestConsole(TrackerSuite):
    name = "console"


class TestJsonl(TrackerSuite):
    name = "jsonl"

    def read(self, run_dir: Path) -> Sequence[tuple[int, float]]:
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        return [(row["step"], row["reward/mean"]) for row in rows]


class TestReport(TrackerSuite):
    name = "report"


def test_every_tracker_of_this_distribution_is_tested_here() -> None:
    ours = {name for name in trackers.names() if trackers.find(name).value.startswith("rollcast_report.")}
    ours -= {name for name in ours if ".services." in trackers.find(name).value}
    here = [case for case in globals().values() if isinstance(case, type) and issubclass(case, TrackerSuite)]
    assert {case.name for case in here if case is not TrackerSuite} == ours
