"""``rollcast runs``: directories side by side."""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollcast.errors import DataError
from rollcast_report.commands import runs_app
from rollcast_report.records import encode_record
from rollcast_report.run_data import Status, write_status


def make_run(path: Path, state: str, accuracies: list[float], **config: Any) -> Path:
    path.mkdir(parents=True)
    records = [{"val/accuracy": value, "reward/mean": value / 2, "time/step_s": 1.0} for value in accuracies]
    (path / "metrics.jsonl").write_bytes(b"".join(encode_record(step, each) for step, each in enumerate(records)))
    tree = {"run_dir": str(path), "model": {"path": f"{path}/model"}, "trainer": config}
    (path / "config.yaml").write_text(json.dumps(tree))
    write_status(path, Status(state=state, total_steps=5, elapsed_s=75.0))
    return path


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    make_run(tmp_path / "runs" / "a", "finished", [0.1, 0.9, 0.8], seed=1)
    make_run(tmp_path / "runs" / "a" / "warm_start", "finished", [0.1])
    make_run(tmp_path / "runs" / "more" / "b", "running", [0.2, 0.4], seed=2, save_freq=3)
    (tmp_path / "runs" / "empty").mkdir()
    return tmp_path / "runs"


def call(*arguments: str | Path) -> str:
    done = CliRunner().invoke(runs_app, [str(each) for each in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_list(runs: Path) -> None:
    found = {Path(each["run"]).name: each for each in json.loads(call("list", runs, "--json"))}
    assert set(found) == {"a", "b"}  # the warm start is part of a
    assert found["a"]["best_accuracy"] == 0.9
    assert found["a"]["accuracy"] == 0.8
    assert found["a"]["step"] == 2
    assert found["b"]["state"] == "interrupted"  # no process writes it
    text = call("list", runs)
    assert "2/5" in text
    assert "1:15" in text


def test_compare(runs: Path) -> None:
    a, b = runs / "a", runs / "more" / "b"
    found = json.loads(call("compare", a, b, "--json"))
    assert found["val/accuracy"] == {str(a): 0.8, str(b): 0.4}
    assert json.loads(call("compare", a, b, "-m", "reward/mean", "--json")) == {
        "reward/mean": {str(a): 0.4, str(b): 0.2}
    }
    with pytest.raises(DataError, match=r"no run has the metric 'nothing'; there are: reward/mean, time/step_s"):
        call("compare", a, b, "-m", "nothing")


def test_diff_leaves_out_the_runs_own_folders(runs: Path) -> None:
    a, b = runs / "a", runs / "more" / "b"
    found = json.loads(call("diff", a, b, "--json"))
    assert found == {"trainer.save_freq": [None, 3], "trainer.seed": [1, 2]}
    assert call("diff", a, a).strip() == "no key differs"


@pytest.mark.parametrize("content", [None, "- a\n", "a: [", b"\xff\xfe"])
def test_a_damaged_config_is_named(runs: Path, content: str | bytes | None) -> None:
    file = runs / "a" / "config.yaml"
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=r"config\.yaml"):
        call("diff", runs / "a", runs / "more" / "b")


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no folder"):
        call("list", tmp_path / "nothing")
    with pytest.raises(DataError, match="no such folder"):
        call("compare", tmp_path / "nothing")
    assert "there is no run in" in call("list", tmp_path)


def test_report_writes_the_page_of_a_run(runs: Path) -> None:
    page = Path(call("report", runs / "a").replace("\n", ""))
    assert page == runs / "a" / "report.html"
    assert "Validation accuracy" in page.read_text()
    with pytest.raises(DataError, match="no run directory"):
        call("report", runs / "nothing")


COMMAND = ["train", "recipe=quickstart", "model.path=my models/a", "trainer.seed=3", "run_dir=runs/b"]


def interrupted(path: Path, **changes: Any) -> Path:
    make_run(path, "interrupted", [0.5])
    status = Status(state="interrupted", total_steps=5, command=COMMAND, folder=str(Path.cwd()))
    write_status(path, replace(status, **changes))
    return path


def test_resume_prints_the_recorded_command(tmp_path: Path) -> None:
    run = interrupted(tmp_path / "b")
    expected = "rollcast train recipe=quickstart 'model.path=my models/a' trainer.seed=3 run_dir=runs/b"
    assert call("resume", run).strip() == expected
    interrupted(tmp_path / "c", folder="/a folder", command=[*COMMAND, "+trainer.resume_mode='disable'"])
    assert call("resume", tmp_path / "c").strip() == f"cd '/a folder' && {expected}"
    (found,) = (each for each in json.loads(call("list", tmp_path, "--json")) if each["run"] == str(run))
    assert found["resume"] == expected
    assert f"rollcast runs resume {run}" in call("list", tmp_path)


def test_resume_executes_the_command_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, list[str], str]] = []
    monkeypatch.setattr(os, "execv", lambda program, argv: calls.append((program, argv, str(Path.cwd()))))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    call("resume", interrupted(tmp_path / "b", folder=str(tmp_path / "home")), "--execute")
    assert calls == [(sys.executable, [sys.executable, "-m", "rollcast", *COMMAND], str(tmp_path / "home"))]
    with pytest.raises(DataError, match=r"was started in .*gone, which is gone"):
        call("resume", interrupted(tmp_path / "c", folder=str(tmp_path / "gone")), "--execute")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state": "finished"}, "is finished at step"),
        ({"state": "running", "host": socket.gethostname(), "pid": os.getpid()}, "is running .process"),
        ({"command": []}, "does not say which command"),
    ],
)
def test_what_cannot_be_resumed(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        call("resume", interrupted(tmp_path / "b", **changes))
