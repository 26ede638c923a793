"""Every reader of a run's files, fed with damaged ones: an answer or one message, never a traceback."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollcast.errors import RollcastError
from rollcast_report.commands import runs_app
from rollcast_report.records import encode_record
from rollcast_report.run_data import Status, write_status
from rollcast_report.watch import watch_app

FILES = ("metrics.jsonl", "timeline.jsonl", "samples.jsonl", "recoveries.jsonl", "status.json")
#: Values that no run writes, for any place of a record.
STRANGE: tuple[Any, ...] = (
    *(-1, -(10**30), 10**30, 2**63, 1e308, 0.5, True, None, "", "text", "\ud800", [], [[]], {}, {"step": {}}),
    *([None], ["a", 1], {"a": None}, [1e400, -1e400], "9" * 5000),
)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("good") / "run"
    run.mkdir()
    write_status(run, Status(state="finished", run_name="demo", total_steps=4, elapsed_s=8.0))
    (run / "config.yaml").write_text("trainer: {name: ppo}\n")
    for step in range(5):
        spans = {"generate": [[0.0, 1.0]], "update_actor": [[1.0, 2.0]]}
        pool = {"global_pool": {"busy_s": 2.0, "calls": spans}}
        records = {
            "metrics.jsonl": {"time/step_s": 2.0, "reward/mean": step / 4, "val/reward": 0.5, "perf/x_gb/peak": 1.0},
            "timeline.jsonl": {"began": 100.0 + 2 * step, "seconds": 2.0, "stages": spans, "pools": pool},
            "samples.jsonl": {"prompt": "2+2", "response": "4", "reward": 1.0, "ground_truth": "4"},
            "recoveries.jsonl": {"message": "a worker died", "recovery": 1},
        }
        for name, values in records.items():
            with (run / name).open("ab") as file:
                file.write(encode_record(step, values))
    return run


def damage(text: bytes, chance: random.Random) -> bytes:
    """Return a file in which one line is cut, repeated, exchanged, or has a strange value somewhere."""
    lines = [text] if text.startswith(b"{\n") else text.splitlines(keepends=True) or [b"{}\n"]
    place = chance.randrange(len(lines))
    kind = chance.choice(["cut", "bytes", "repeat", "drop", "value", "value", "value", "value", "key"])
    if kind == "cut":
        lines[place] = lines[place][: chance.randrange(len(lines[place]))] + b"\n"
    elif kind == "bytes":
        lines[place] = bytes(chance.randrange(256) for _ in range(40)) + b"\n"
    elif kind == "repeat":
        lines.insert(place, lines[-1])
    elif kind == "drop":
        del lines[place]
    else:
        try:
            record = json.loads(lines[place])
        except ValueError:
            return text  # damaged before
        if not isinstance(record, dict) or not record:
            return text
        holder: Any = record
        key: Any = chance.choice(list(holder))
        while isinstance(holder[key], dict | list) and holder[key] and chance.random() < 0.7:
            holder = holder[key]
            key = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        if kind == "key" and isinstance(holder, dict):
            del holder[key]
        else:
            holder[key] = chance.choice(STRANGE)
        lines[place] = json.dumps(record).encode() + b"\n"
    return b"".join(lines)


def commands(run: Path, good: Path) -> list[tuple[Any, list[str]]]:
    return [
        (watch_app, [str(run), "--once"]),
        (runs_app, ["list", str(run.parent)]),
        (runs_app, ["compare", str(run), str(good)]),
        (runs_app, ["diff", str(run), str(good)]),
        (runs_app, ["report", str(run), "--output", str(run.parent / "page.html")]),
        (runs_app, ["resume", str(run)]),
    ]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.cases(2)
def test_damaged_files_end_no_command_with_a_traceback(seed: int, good: Path, tmp_path: Path) -> None:
    chance, run = random.Random(seed), tmp_path / "runs" / "run"
    invoke: Callable[..., Any] = CliRunner().invoke
    for turn in range(25):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(good, run)
        names = chance.choices(FILES, k=3)
        for name in names:
            (run / name).write_bytes(damage((run / name).read_bytes(), chance))
        for app, arguments in commands(run, good):
            result = invoke(app, arguments)
            shown = f"turn {turn}, {arguments[0]}: " + "\n".join(
                f"{(run / name).read_bytes()!r:.2000}" for name in names
            )
            if result.exception is not None and not isinstance(result.exception, RollcastError | SystemExit):
                raise AssertionError(shown) from result.exception


@pytest.mark.parametrize("step", [-1, -(10**9), 10**30])
@pytest.mark.parametrize("seconds", [2.0, 1e308, -5.0])
def test_steps_that_no_run_takes_are_unreadable(step: int, seconds: float, good: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(good, run)
    write_status(run, Status(state="running", run_name="demo", total_steps=10, elapsed_s=5.0))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "time/step_s": seconds}) + "\n")
        file.write(json.dumps({"step": step, "time/step_s": seconds}) + "\n")
    result = CliRunner().invoke(watch_app, [str(run), "--once"], catch_exceptions=False)
    assert result.exit_code == 0 and "4/10" in result.output and str(step) not in result.output
