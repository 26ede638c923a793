"""docs/asynchronous.md: its admission is built, installed, tested and simulated."""

from __future__ import annotations

import json
from pathlib import Path

from page_packages import PagePackage


def test_the_pages_admission_passes_its_suite_and_is_simulated(tmp_path: Path) -> None:
    plugin = PagePackage("asynchronous.md", "rollcast-newest", tmp_path)
    assert plugin.count_passed() >= 12
    command = ("simulate", "recipe=quickstart", "trainer.admission=newest", "--json", "--staleness", "1,4")
    rows = json.loads(plugin.rollcast(*command, "--tokens-per-second", "1", "--mean-length", "8", "--steps", "30"))
    assert [row["max_staleness"] for row in rows] == [1, 4]
    assert all(row["age_bound"] is None and row["dropped"] == 0 for row in rows)
    assert rows[1]["max_age"] > 4  # nothing keeps the first groups from waiting
