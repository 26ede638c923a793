"""``rollcast watch``: a run is followed by its files, whatever becomes of it."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rollcast.errors import DataError
from rollcast_report.follow import Follower
from rollcast_report.records import encode_record
from rollcast_report.run_data import Status, write_status
from rollcast_report.watch import describe_step, render_frame, sparkline, watch_app


def _status(run: Path, state: str = "running", **changes: Any) -> None:
    values = {"total_steps": 10, "elapsed_s": 60.0, "host": socket.gethostname(), "pid": os.getpid(), **changes}
    write_status(run, Status(state=state, run_name="demo", **values))


def _append(run: Path, step: int, **metrics: Any) -> None:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(encode_record(step, {"time/step_s": 2.0, "reward/mean": step / 10, **named}))


def _text(run: Path, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render_frame(Follower(run).read(), width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    _status(tmp_path)
    _append(tmp_path, 0, val__accuracy=0.25, time__validate_s=9.0)
    for step in range(1, 5):
        _append(
            tmp_path,
            step,
            time__generate_s=1.5,
            time__update_actor_s=0.5,
            perf__cpu_memory_used_gb=1.25,
            rollout__groups_waiting=3.0,
            staleness__mean=0.5,
            staleness__max=1.0,
            rollout__weight_version=float(step),
            sync__seconds=0.03,
        )
    return tmp_path


def test_a_frame_has_what_the_run_recorded(run: Path) -> None:
    text = _text(run)
    assert "demo  running" in text and "4/10  0:12 left" in text
    for part in ("2 s/step", "▁▃▅▆█", "accuracy 25.0 % (step 0)", "1.5 s  generate", "process 1.25 GB", "3 waiting"):
        assert part in text, part
    assert "mean 0.5, most 1 versions" in text and "version 4, sent in 0.03 s" in text
    assert "validate" not in text  # step 0 had one, the last step had none
    assert text.index("1.5 s  generate") < text.index("0.5 s  update_actor")
    assert max(map(len, _text(run, 60).splitlines())) <= 60


def test_only_new_lines_are_read_and_a_torn_one_waits(run: Path) -> None:
    follower = Follower(run)
    assert follower.read().step == 4
    line = encode_record(5, {"reward/mean": 0.9})
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(line[:9])
    assert follower.read().step == 4
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(line[9:])
    frame = follower.read()
    assert frame.step == 5 and list(frame.series["reward/mean"]) == [0.0, 0.1, 0.2, 0.3, 0.4, 0.9]


def test_a_run_that_resumed_is_read_anew(run: Path) -> None:
    follower = Follower(run)
    follower.read()
    replaced = run / "new"
    replaced.write_bytes(encode_record(2, {"reward/mean": 0.2}))
    os.replace(replaced, run / "metrics.jsonl")
    frame = follower.read()
    assert frame.step == 2 and list(frame.series["reward/mean"]) == [0.2]


def test_a_killed_run_raises_an_alarm_and_tells_how_to_resume(run: Path) -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], check=True, capture_output=True)
    command = ["train", "recipe=quickstart", "run_dir=a b", "trainer.resume_mode=disable"]
    _status(run, pid=int(gone.stdout), command=command, folder="/elsewhere")
    frame = Follower(run).read()
    assert frame.state == "interrupted" and frame.remaining_s is None
    assert frame.alarms == [f"the process {int(gone.stdout)} of the run is gone, without a word"]
    assert frame.command == "cd /elsewhere && rollcast train recipe=quickstart 'run_dir=a b'"


def test_silence_failures_and_numbers_that_are_not_finite_are_alarms(run: Path) -> None:
    _append(run, 5, actor__kl=float("nan"), actor__skipped_steps=0.5, reward__errors=2.0)
    for name in ("metrics.jsonl", "status.json"):
        os.utime(run / name, (time.time() - 4000,) * 2)
    assert Follower(run).read().alarms == [
        "no sign of life for 1:06:40; a step takes 0:02",
        "not finite in step 5: actor/kl",
        "50% of the updates of step 5 were skipped: a gradient was not finite",
        "2 rewards of step 5 failed",
    ]
    _status(run, "failed", message="ValueError: rank 1")
    assert "! ValueError: rank 1" in _text(run)


def test_a_run_on_another_machine_counts_as_running(run: Path) -> None:
    _status(run, host="another", pid=1)
    assert Follower(run).read().state == "running"


def test_a_run_that_starts(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("host 1")
    frame = Follower(tmp_path).read()
    assert frame.state == "starting" and "waiting for the first step" in _text(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        Follower(tmp_path / "nothing").read()


def test_a_warm_start_is_shown_while_it_is_on(tmp_path: Path) -> None:
    warm = tmp_path / "warm_start"
    warm.mkdir()
    (tmp_path / ".lock").write_text("host 1")
    _append(warm, 3)
    _status(warm)
    follower = Follower(tmp_path)
    assert (follower.read().name, follower.read().step) == (f"{tmp_path.name}: warm start", 3)
    _status(warm, "finished")
    assert (follower.read().state, follower.read().step) == ("starting", None)  # and watching goes on


def test_once_prints_one_frame_also_of_a_finished_run(run: Path) -> None:
    _status(run, "finished")
    done = CliRunner().invoke(watch_app, [str(run), "--once"])
    assert done.exit_code == 0 and "demo  finished" in done.output


def test_without_a_terminal_there_is_a_line_a_step_until_the_run_ends(run: Path) -> None:
    def go_on() -> None:
        time.sleep(0.3)
        _append(run, 5)
        time.sleep(0.3)
        _status(run, "finished")

    writer = threading.Thread(target=go_on)
    writer.start()
    done = CliRunner().invoke(watch_app, [str(run), "--interval", "0.1"])
    writer.join()
    lines = done.output.splitlines()
    assert lines == ["step 4/10  2.00 s  reward 0.4  0:12 left", "step 5/10  2.00 s  reward 0.5  0:10 left", "finished"]


def test_sparklines() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([2.0, 2.0], 8) == "▄▄" and sparkline([], 8) == "" and sparkline([1.0], 0) == ""


def test_a_line_of_a_step_with_its_validation(run: Path) -> None:
    values = {"val/accuracy": 0.5, "val/acc/mean@1": 0.5, "val/acc/mean@1/low": 0.4, "val/acc/mean@1/high": 0.6}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, **values}) + "\n")
    assert "accuracy 50.0 % (40.0 % to 60.0 %)" in describe_step(Follower(run).read())
