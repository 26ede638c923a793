"""report.html: complete, harmless, and there for every way that a run can end."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pluggy
import pytest
from packed_page import PackedPage

from rollcast.contracts import hooks as hookspecs
from rollcast.contracts.command import record_command
from rollcast.errors import DataError
from rollcast_report.archive import PageLimits
from rollcast_report.charts import ChartSpec, format_number, render_chart, smooth, thin
from rollcast_report.jsonl import JsonlTracker
from rollcast_report.report import ReportTracker, write_report
from rollcast_report.run_data import read_run
from rollcast_report.samples import read_samples

_EVIL = "<script>alert('x')</script><img src=x onerror=alert(1)> & \"q\" $style ${title}"
_TRAINER = SimpleNamespace(total_steps=20, run_name="demo <run>")


class _Page(HTMLParser):
    """What a browser would make of the page."""

    void = frozenset({"meta", "line", "circle", "path", "br", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def _page(path: Path) -> _Page:
    page = _Page(path.read_text("utf-8"))
    assert page.open == []
    return page


def _samples(step: int, count: int = 3) -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"question {index}",
            "response": f"answer of step {step}: {_EVIL}",
            "ground_truth": "42",
            "score": float(step > 0),
            "correct": step > 0,
        }
        for index in range(count)
    ]


def _drive(run_dir: Path, steps: int = 20, error: BaseException | None = None, end: bool = True) -> None:
    manager = pluggy.PluginManager("rollcast")
    manager.add_hookspecs(hookspecs)
    trackers = [ReportTracker(run_dir, {"fallback": "config"}), JsonlTracker(run_dir, {})]
    for tracker in trackers:
        manager.register(tracker)
    hook = manager.hook
    hook.on_fit_start(trainer=_TRAINER)
    for step in range(steps + 1):
        metrics = {} if step == 0 else {"reward/mean": math.sin(step), "time/step_s": 0.3, "actor/kl": 1e-4 * step}
        if step:
            metrics |= {"staleness/mean": 1.0, "rollout/idle_s": 0.1}
        if step % 10 == 0:
            metrics["val/accuracy"] = step / 40
            hook.on_validation_end(trainer=_TRAINER, step=step, metrics=metrics, samples=_samples(step))
        hook.on_metrics(trainer=_TRAINER, step=step, metrics=metrics)
    if error is not None:
        hook.on_exception(trainer=_TRAINER, error=error)
    if end:
        hook.on_fit_end(trainer=_TRAINER, error=error)
    for tracker in trackers:
        tracker.close()


def test_finished_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("lr: 1e-6\nx: '<b>'\nhf_token: secret-value\npad_token: keep\n")
    _drive(tmp_path)
    page = _page(tmp_path / "report.html")
    assert "demo <run>" in page.text and "Finished" in page.text
    assert "rose from 0.0 % before training to 50.0 % at step 20" in page.text
    assert page.count("svg") == 6
    assert "KL to the policy before the update" in page.text and "Age of trained tokens" in page.text
    assert all(attrs["role"] == "img" and attrs["aria-label"] for tag, attrs in page.tags if tag == "svg")
    assert "before training" in page.text
    assert "lr: 1e-6" in page.text and "x: '<b>'" in page.text and "pad_token: keep" in page.text
    assert "secret-value" not in page.text
    status = json.loads((tmp_path / "status.json").read_text())
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert (status["state"], status["step"]) == ("finished", 20)
    assert status["metrics"] == {name: value for name, value in last.items() if name != "step" and value is not None}


def test_metrics_of_the_user_have_curves(tmp_path: Path) -> None:
    lines = [
        {"step": n, "reward/<b>": n, "reward/max": 1, "mine": 2.0 * n, "perf/x": n, "actor/odd": n} for n in (1, 2)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = _page(write_report(tmp_path))
    drawn = [attrs["aria-label"] for tag, attrs in page.tags if tag == "svg" and "aria-label" in attrs]
    assert [str(label).partition(":")[0] for label in drawn] == ["actor/odd", "mine", "reward/<b>"]


def test_what_a_model_wrote_stays_text(tmp_path: Path) -> None:
    _drive(tmp_path)
    page = _page(tmp_path / "report.html")
    packed = PackedPage((tmp_path / "report.html").read_text("utf-8"))
    assert sum(_EVIL in each["response"] for each in packed.details) == 9  # kept as written
    assert page.count("img") == 0
    executable = [attrs for tag, attrs in page.tags if tag == "script" and "type" not in attrs]
    assert len(executable) == 1
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)


def test_nothing_from_outside(tmp_path: Path) -> None:
    _drive(tmp_path)
    text = (tmp_path / "report.html").read_text().replace(_EVIL, "")
    assert not re.search(r"https?:|//\w|url\(|@import|<link|\bfetch\b|XMLHttp", text)
    page = _page(tmp_path / "report.html")
    assert not any(name in ("src", "href", "xlink:href") for _, attrs in page.tags for name in attrs)


def test_only_its_own_script_may_run(tmp_path: Path) -> None:
    import base64
    import hashlib

    text = write_report(tmp_path).read_text()
    script = text.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text


def test_report_of_the_validation_itself_is_current(tmp_path: Path) -> None:
    _drive(tmp_path, steps=10, end=False)
    page = _page(tmp_path / "report.html")
    assert "Running" in page.text and "10 of 20" in page.text
    packed = PackedPage((tmp_path / "report.html").read_text("utf-8"))
    assert "answer of step 10" in packed.details[-1]["response"]


@pytest.mark.parametrize(
    ("error", "word"),
    [(ValueError("rank 1 died <x>"), "ValueError: rank 1 died <x>"), (KeyboardInterrupt(), "Interrupted")],
)
def test_run_that_ended_early(tmp_path: Path, error: BaseException, word: str) -> None:
    _drive(tmp_path, steps=7, error=error)
    page = _page(tmp_path / "report.html")
    assert word in page.text and "7 of 20" in page.text
    assert ('</h1><span class="pill bad">Failed' in (tmp_path / "report.html").read_text()) is isinstance(
        error, ValueError
    )


def test_killed_run(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from types import SimpleNamespace\n"
        "from rollcast_report import JsonlTracker, ReportTracker\n"
        "d = Path(sys.argv[1]); t = SimpleNamespace(total_steps=20, run_name='killed')\n"
        "j, r = JsonlTracker(d, {}), ReportTracker(d, {})\n"
        "j.on_fit_start(t); r.on_fit_start(t)\n"
        "for s in range(1, 8): j.on_metrics(t, s, {'reward/mean': s / 10})\n"
        "os.write(j._writers['metrics.jsonl']._file.fileno(), b'{\"step\": 8, \"rew')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=15)
    assert done.returncode == -signal.SIGKILL
    page = _page(write_report(tmp_path))
    assert "Interrupted" in page.text and "7 of 20" in page.text
    assert "Mean reward rose from 0.1 at step 1 to 0.7 at step 7." in page.text


def test_empty_run(tmp_path: Path) -> None:
    page = _page(write_report(tmp_path, {"trainer": {"lr": 1}}))
    assert "Nothing has been measured yet" in page.text and '"lr": 1' in page.text and page.count("svg") == 0
    with pytest.raises(DataError, match="not a run directory"):
        write_report(tmp_path / "nowhere")


def test_one_point_and_no_value(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5, "actor/kl": null}\nbroken\n')
    page = _page(write_report(tmp_path))
    assert "Mean reward was 0.5 at step 1." in page.text and "No value was recorded." in page.text
    assert "metrics.jsonl: 1 unreadable (line 2)" in page.text and "End not recorded" in page.text


def test_broken_status_is_noted(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("")
    page = _page(write_report(tmp_path))
    assert "status.json is not JSON" in page.text
    tracker = ReportTracker(tmp_path, {}, start_step=3)
    tracker.on_fit_start(_TRAINER)
    assert read_run(tmp_path).status.state == "running"


def test_resumed_run_adds_up_its_time(tmp_path: Path) -> None:
    _drive(tmp_path, steps=3, end=False)
    status = json.loads((tmp_path / "status.json").read_text())
    (tmp_path / "status.json").write_text(json.dumps({**status, "elapsed_s": 1000.0}))
    tracker = ReportTracker(tmp_path, {}, start_step=3)
    tracker.on_fit_start(_TRAINER)
    tracker.on_fit_end(_TRAINER, None)
    assert json.loads((tmp_path / "status.json").read_text())["elapsed_s"] > 1000


def test_single_validation_and_chat_prompt(tmp_path: Path) -> None:
    record = {"step": 4, "prompt": [{"role": "user", "content": "hi <b>"}], "response": "x" * 700, "correct": True}
    (tmp_path / "samples.jsonl").write_text((json.dumps(record) + "\n") * 450)
    text = write_report(tmp_path, limits=PageLimits(samples=200, characters=100_000)).read_text("utf-8")
    packed = PackedPage(text)
    assert packed.details[0]["prompt"] == "user: hi <b>"
    assert packed.details[0]["response"] == "x" * 400 + "\n… (300 more characters in samples.jsonl)"
    assert "200 of 450 samples, of 1 of 1 validations" in text and packed.index["step"] == [4] * 200


def test_samples_of_several_validations_are_compared_by_prompt(tmp_path: Path) -> None:
    lines = []
    for step, marks in ((0, "0011"), (5, "0101"), (10, "1101")):
        lines += [
            {"step": step, "prompt": f"p{n}", "response": "r", "correct": mark == "1"} for n, mark in enumerate(marks)
        ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines) + "odd\n")
    packed = PackedPage(write_report(tmp_path).read_text("utf-8"))
    fixed, broken = (1 << packed.index["flagNames"].index(name) for name in ("fixed", "broken"))
    assert packed.index["flags"] == [0] * 4 + [0, fixed, broken, 0] + [fixed, fixed, broken, 0]
    assert packed.index["prompt"] == [0, 1, 2, 3] * 3
    assert "samples.jsonl: 1 unreadable (line 13)" in packed.text


def test_a_long_run_keeps_its_first_and_last_validation(tmp_path: Path) -> None:
    lines = [{"step": step, "prompt": f"p{n}", "response": ""} for step in range(0, 50, 5) for n in range(10)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    found = read_samples(tmp_path / "samples.jsonl", PageLimits(samples=39))
    assert [each.step for each in found.entries] == [0] * 10 + [20] * 10 + [45] * 10
    few = read_samples(tmp_path / "samples.jsonl", PageLimits(samples=6))
    assert [(each.step, each.opening) for each in few.entries] == [(s, f"p{n}") for s in (0, 45) for n in (0, 4, 9)]
    assert (few.total, few.validations, few.shown_validations) == (100, 10, 2)


@pytest.mark.parametrize(
    "values",
    [
        [0.0], [1.0], [-3.0, -3.0], [0.0, 0.0, 0.0], [1e-9, 3e-9], [1e300, -1e300], [5e6, 5e6 + 1], [None, 1.0, None],
        [None, None], [], [-0.02, 0.02], [-1e-7, 3.0], [0.5, None, None, 0.7, None, 0.1], [1.0, 1.0 + 1e-16],
    ],
)  # fmt: skip
@pytest.mark.parametrize("spec", [ChartSpec("a", "A"), ChartSpec("a", "A", "%", 0.0, 1.0, mark_zero=True)])
def test_chart_of_odd_series(values: list[float | None], spec: ChartSpec) -> None:
    text = render_chart(list(enumerate(values)), spec, 560, 290, len(values))
    assert _Page(text).open == []
    assert "nan" not in text and "inf" not in text
    assert not re.search(r">-0(\.0*)?[ %kM]*<", text)  # zero has no sign
    for x, y in re.findall(r'cx="([-\d.e+]+)" cy="([-\d.e+]+)"', text):
        assert 0 <= float(x) <= 560 and 0 <= float(y) <= 290


def test_long_series_is_thinned_and_keeps_spikes() -> None:
    series = [(step, 100.0 if step == 7777 else math.sin(step)) for step in range(50_000)]
    kept = thin(series)  # type: ignore[arg-type]
    assert len(kept) <= 2000 and (7777, 100.0) in kept and kept == sorted(kept)
    assert len(render_chart(series, ChartSpec("a", "A"), 560, 290, 50_000)) < 200_000  # type: ignore[arg-type]


def test_smooth_and_numbers() -> None:
    assert smooth([2.0] * 9, 5) == pytest.approx([2.0] * 9)
    line = [float(index) for index in range(200)]
    assert smooth(line, 9)[100] == pytest.approx(100.0)  # no lag
    shown = [format_number(value) for value in (0.0, 0.12345, 12.345, 31000, 2.5e6, 2.6e-5, -0.5)]
    assert shown == ["0", "0.1235", "12.3", "31k", "2.5M", "2.60e-5", "-0.5"]
    assert format_number(0.5125, "%") == "51.2 %"


def test_recoveries_are_a_table(tmp_path: Path) -> None:
    _drive(tmp_path)
    assert "Recoveries" not in _page(tmp_path / "report.html").text
    line = {"number": 1, "failed_step": 7, "step": 5, "reason": f"rank 1 died {_EVIL}"}
    (tmp_path / "recoveries.jsonl").write_text(json.dumps(line) + "\nnot json\n")
    write_report(tmp_path)
    page = _page(tmp_path / "report.html")
    assert "Recoveries" in page.text and f"rank 1 died {_EVIL}" in page.text
    assert "recoveries.jsonl: 1 unreadable (line 2)" in page.text


def test_the_status_tells_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLCAST_COMMAND", "")
    monkeypatch.chdir(tmp_path)
    record_command(["train", "recipe=x"])
    _drive(tmp_path, steps=1)
    status = read_run(tmp_path).status
    assert (status.command, status.folder) == (["train", "recipe=x"], str(tmp_path))
