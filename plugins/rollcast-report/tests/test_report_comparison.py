"""Several runs on one page, the bands of curves, and the panels of memory and weight syncs."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_browser import Page
from typer.testing import CliRunner

from rollcast.errors import DataError
from rollcast_report.charts import ChartSpec, render_chart
from rollcast_report.commands import runs_app
from rollcast_report.comparison import write_comparison
from rollcast_report.intervals import Band, find_band, wilson
from rollcast_report.report import write_report
from rollcast_report.run_data import Status, write_status


def _run(path: Path, config: dict[str, Any], *metrics: dict[str, Any]) -> Path:
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": n, **each}) + "\n" for n, each in enumerate(metrics))
    )
    (path / "config.yaml").write_text(json.dumps({"run_dir": str(path), **config}))
    write_status(path, Status(state="finished", elapsed_s=90.0))
    return path


class _Text(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.text = ""
        self.labels: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "svg" and dict(attrs).get("aria-label"):
            self.labels.append(str(dict(attrs)["aria-label"]))

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    sums = [{"reward/mean": 0.1, "time/step_s": 1.0}, {"reward/mean": 0.5, "val/accuracy": 0.5, "val/samples": 100.0}]
    return [
        _run(tmp_path / "a" / "run", {"trainer": {"seed": 1, "api_key": "s3cret"}, "lr": 0.1}, *sums),
        _run(
            tmp_path / "b" / "run",
            {"trainer": {"seed": 2, "api_key": "other"}, "lr": 0.1},
            {"reward/mean": 0.2, "mine": 1},
            {"reward/mean": 0.3, "mine": 2},
        ),
    ]


def test_runs_share_axes_and_their_settings_are_compared(two: list[Path], tmp_path: Path) -> None:
    page = _Text(write_comparison(two, tmp_path / "both.html").read_text())
    reward = next(label for label in page.labels if label.startswith("Reward."))
    assert reward == (
        "Reward. a/run: 0.1 at step 0, 0.5 at step 1; lowest 0.1, highest 0.5. "
        "b/run: 0.2 at step 0, 0.3 at step 1; lowest 0.2, highest 0.3."
    )
    assert any(label.startswith("mine.") for label in page.labels)
    assert "50.0 % (40.4 % to 59.6 %)" in page.text and "1 min 30 s" in page.text
    settings = page.text.partition("Settings that differ")[2]
    assert re.search(r"trainer\.seed\s+1\s+2", settings) and "lr" not in settings.split()
    assert "s3cret" not in page.text and "(hidden)" in settings


def test_the_command_writes_one_page(two: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "both.html"
    done = CliRunner().invoke(runs_app, ["report", *map(str, two), "--output", str(output)], catch_exceptions=False)
    assert done.output.replace("\n", "") == str(output) and "2 runs compared" in output.read_text()
    with pytest.raises(DataError, match="needs --output FILE"):
        CliRunner().invoke(runs_app, ["report", *map(str, two)], catch_exceptions=False)
    with pytest.raises(DataError, match="is a folder"):
        CliRunner().invoke(runs_app, ["report", str(two[0]), "--output", str(tmp_path)], catch_exceptions=False)
    with pytest.raises(DataError, match="9 runs are too many"):
        write_comparison(two[:1] * 9, output)


def test_runs_without_metrics_or_settings(two: list[Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    page = _Text(write_comparison([tmp_path / "empty", two[0]], tmp_path / "page.html").read_text())
    assert "empty: " in page.text and "cannot be read" in page.text and "Settings that differ" not in page.text
    only = _Text(write_comparison([tmp_path / "empty"] * 2, tmp_path / "page.html").read_text())
    assert "None of these runs has metrics yet" in only.text


def test_a_comparison_in_a_browser(two: list[Path], tmp_path: Path, tab: Page) -> None:
    tab.open(write_comparison(two, tmp_path / "both.html"))
    dashes = tab.run(
        "[...document.querySelectorAll('.chart .line')].slice(0, 2)"
        ".map((each) => getComputedStyle(each).strokeDasharray)"
    )
    assert len(set(dashes)) == 2
    tab.run("document.querySelector('.chart svg').focus()")
    tab.press("ArrowLeft")
    assert tab.run("document.querySelector('.chart .tip').textContent") == "step 1 · a/run 0.5 · b/run 0.3"


def test_wilson_agrees_with_published_values() -> None:
    # Newcombe 1998, table I: 81 of 263, and 0 of 20.
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0.0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)


def test_bands_come_from_what_was_recorded() -> None:
    accuracy: dict[str, Any] = {"val/accuracy": [(0, 0.5), (5, None), (10, 0.6)]}
    assert find_band("val/accuracy", accuracy) is None
    counted = find_band("val/accuracy", {**accuracy, "val/samples": [(0, 100.0), (10, 100.0)]})
    assert counted is not None and [step for step, _, _ in counted.points] == [0, 10] and "Wilson" in counted.method
    bounds: dict[str, Any] = {
        "val/acc/mean@4/low": [(0, 0.4), (10, 0.5)],
        "val/acc/mean@4/high": [(0, 0.6), (10, None)],
    }
    recorded = find_band("val/accuracy", {**accuracy, "val/acc/mean@4": [(0, 0.5)], **bounds})
    assert recorded is not None and recorded.points == [(0, 0.4, 0.6)] and "bootstrap" in recorded.method
    mine = find_band("mine", {"mine": [(1, 2.0)], "mine/low": [(1, 1.0)], "mine/high": [(1, 3.0)]})
    assert mine == Band([(1, 1.0, 3.0)], "as recorded")


def test_a_band_is_drawn_within_the_axes() -> None:
    band = Band([(step, 0.2, 0.9) for step in range(4)], "as recorded")
    text = render_chart([(step, 0.5) for step in range(4)], ChartSpec("a", "A"), 560, 290, 3, band)
    (path,) = re.findall(r'class="band" d="M([^"]+)z"', text)
    heights = [float(pair.split()[1]) for pair in path.split("L")]
    assert len(heights) == 8 and 0 <= min(heights) < max(heights) <= 290
    assert "0.5 (0.2 to 0.9)" in text and "95 % interval" in text
    single = render_chart([(0, 0.5)], ChartSpec("a", "A"), 560, 290, 3, Band([(0, 0.2, 0.9)], "x"))
    assert 'class="band" d="M' in single


def test_memory_and_weight_syncs_have_panels(tmp_path: Path) -> None:
    metrics = {
        "perf/max_memory_allocated_gb": 8.0, "perf/max_memory_allocated_gb/update_actor": 8.0,
        "perf/cpu_memory_used_gb/generate": 2.0, "sync/seconds": 0.5, "sync/GB_per_s": 4.0,
        "staleness/0": 0.25, "staleness/1": 0.75, "staleness/max": 1.0, "rollout/weight_version": 3.0,
    }  # fmt: skip
    page = _Text(write_report(_run(tmp_path / "run", {}, {"reward/mean": 0.0}, metrics)).read_text())
    memory = page.text.partition("Memory")[2].partition("Weight sync")[0]
    assert re.search(r"update actor\s+8 GB, last 8 GB\s+-", memory)
    assert re.search(r"generate\s+-\s+2 GB, last 2 GB", memory)
    assert re.search(r"Sent in a sync\s+2G bytes\s+2G bytes\s+2G bytes", page.text)
    assert "age 0: 25.0 %, age 1: 75.0 %" in page.text


def test_a_run_without_them_has_no_panels(tmp_path: Path) -> None:
    text = write_report(_run(tmp_path / "run", {}, {"reward/mean": 0.0})).read_text()
    assert "<h2>Memory</h2>" not in text and "<h2>Weight sync" not in text
