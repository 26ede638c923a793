"""What a person sees while a run is on."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from rollcast_report.console import ConsoleTracker

_METRICS = {
    "time/step_s": 0.3123,
    "reward/mean": 0.4121,
    "actor/kl": 0.00123,
    "actor/entropy": 1.0234,
    "rollout/tokens_per_s": 31000.4,
}
_TRAINER = SimpleNamespace(total_steps=90, run_name="demo")


def _plain(tmp_path: Path, trainer: object = _TRAINER, width: int = 60) -> tuple[ConsoleTracker, io.StringIO]:
    out = io.StringIO()
    tracker = ConsoleTracker(tmp_path, {}, console=Console(file=out, force_terminal=False, width=width))
    tracker.on_fit_start(trainer)
    return tracker, out


def test_plain_lines(tmp_path: Path) -> None:
    tracker, out = _plain(tmp_path)
    tracker.on_validation_end(_TRAINER, 0, {"val/accuracy": 0.1}, [{}] * 500)
    tracker.on_metrics(_TRAINER, 0, {"val/accuracy": 0.1})
    tracker.on_metrics(_TRAINER, 12, _METRICS)
    tracker.on_checkpoint_saved(_TRAINER, 12, tmp_path / "checkpoints" / "step_12")
    tracker.on_fit_end(_TRAINER, None)
    tracker.close()
    lines = out.getvalue().splitlines()
    assert lines[:3] == [
        "step 0/90  validation accuracy 0.100 (500 samples)",
        "step 12/90  0.31 s  reward 0.412  kl 0.0012  entropy 1.02  tok/s 31000",
        "step 12/90  checkpoint checkpoints/step_12",
    ]
    assert re.fullmatch(r"step 12/90  finished in \d+:\d\d", lines[3])
    assert "\x1b" not in out.getvalue()


def test_first_and_last_answers_stand_side_by_side(tmp_path: Path) -> None:
    tracker, out = _plain(tmp_path, width=100)
    for step, reply in ((0, "well,\nit [is]"), (5, "between"), (9, "food")):
        samples = [{"prompt": f"{'example ' * 9}word {n}", "response": f"{reply} {n // 2}"} for n in range(9)]
        tracker.on_validation_end(_TRAINER, step, {"val/accuracy": 0.1}, samples)
    tracker.on_fit_end(_TRAINER, None)
    shown = out.getvalue()
    rows = [[cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in shown.splitlines()]
    table = [row for row in rows if len(row) == 3]
    assert table[0] == ["prompt", "step 0", "step 9"]
    assert [row[1:] for row in table[1:]] == [[f"well, it [is] {n // 2}", f"food {n // 2}"] for n in range(4)]
    assert all(row[0].startswith("…") and row[0].endswith(f"word {n}") for n, row in enumerate(table[1:]))
    assert "between" not in shown


def test_one_validation_and_a_failed_run_show_no_answers(tmp_path: Path) -> None:
    for steps, error in (((3,), None), ((0, 3), ValueError("boom"))):
        tracker, out = _plain(tmp_path)
        for step in steps:
            tracker.on_validation_end(_TRAINER, step, {"val/accuracy": 0.1}, [{"prompt": "p", "response": "r"}])
        tracker.on_fit_end(_TRAINER, error)
        assert "held-out answers" not in out.getvalue()


def test_absent_metrics_are_not_shown(tmp_path: Path) -> None:
    tracker, out = _plain(tmp_path, object())
    tracker.on_metrics(None, 1, {"sft/loss": 2.34567, "val/loss": 2.5})
    tracker.on_fit_end(None, ValueError("boom"))
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["step 1  validation loss 2.500", "step 1  loss 2.3457"]
    assert lines[2].startswith("step 1  stopped after ")


def test_square_brackets_are_not_markup(tmp_path: Path) -> None:
    tracker, out = _plain(tmp_path)
    tracker.on_checkpoint_saved(_TRAINER, 1, Path("/elsewhere/[red]x"))
    assert "/elsewhere/[red]x" in out.getvalue()


@pytest.mark.parametrize("width", [30, 120])
def test_terminal(tmp_path: Path, width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, _environ={"TERM": "xterm-256color"})
    tracker = ConsoleTracker(tmp_path, {}, console=console)
    tracker.on_fit_start(_TRAINER)
    tracker.on_validation_end(_TRAINER, 0, {"val/accuracy": 0.125}, [{}])
    tracker.on_metrics(_TRAINER, 0, {"val/accuracy": 0.125})
    tracker.on_metrics(_TRAINER, 1, _METRICS)
    tracker.on_metrics(_TRAINER, 2, _METRICS)
    tracker.on_exception(_TRAINER, KeyboardInterrupt())
    tracker.on_fit_end(_TRAINER, KeyboardInterrupt())
    tracker.close()
    text = out.getvalue()
    assert "\x1b[?25l" in text and text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back
    assert "stopped after" in text
    if width > 100:
        assert "2/90" in text and "ETA" in text and "demo" in text
        assert "reward 0.412" in text and "val accuracy 0.125 (step 0)" in text


def test_close_restores_the_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    stream: Any = sys.stdout
    console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "xterm"})
    tracker = ConsoleTracker(tmp_path, {}, console=console)
    tracker.on_fit_start(_TRAINER)
    tracker.close()
    assert sys.stdout is stream


def test_dumb_terminal_gets_plain_lines(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, _environ={"TERM": "dumb"})
    tracker = ConsoleTracker(tmp_path, {}, console=console)
    tracker.on_fit_start(_TRAINER)
    tracker.on_metrics(_TRAINER, 1, _METRICS)
    assert out.getvalue().startswith("step 1/90  0.31 s  reward")
