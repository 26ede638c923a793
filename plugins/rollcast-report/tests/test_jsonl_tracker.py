"""metrics.jsonl and samples.jsonl: valid, complete, and equal after a resume."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollcast.errors import DataError
from rollcast_report.jsonl import JsonlTracker
from rollcast_report.records import RecordWriter, drop_after, encode_record


def _strict(line: str) -> Any:
    def refuse(token: str) -> None:
        raise ValueError(token)

    return json.loads(line, parse_constant=refuse)


def _run(run_dir: Path, start: int, stop: int) -> None:
    tracker = JsonlTracker(run_dir, {}, start)
    tracker.on_fit_start(None)
    if start == 0:
        tracker.on_validation_end(None, 0, {"val/accuracy": 0.1}, [{"prompt": "p", "response": "r0"}])
        tracker.on_metrics(None, 0, {"val/accuracy": 0.1})
    for step in range(start + 1, stop + 1):
        metrics = {"reward/mean": step / 7, "actor/kl": 1e-9 * step}
        if step % 2 == 0:
            tracker.on_validation_end(None, step, metrics, [{"prompt": "p", "response": f"r{step}"}])
        tracker.on_metrics(None, step, metrics)
    tracker.close()


def test_one_object_a_step_with_step_first(tmp_path: Path) -> None:
    _run(tmp_path, 0, 3)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    records = [_strict(line) for line in lines]
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert all(next(iter(record)) == "step" for record in records)
    assert records[1]["reward/mean"] == 1 / 7  # full precision


@pytest.mark.parametrize("torn", ['{"step": 9, "reward', '{"step": 4, "reward/mean": 0.5}', ""])
def test_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, torn: str) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    _run(whole, 0, 8)
    _run(killed, 0, 6)
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (killed / name).open("a") as file:
            file.write(torn)
    _run(killed, 4, 8)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    assert sorted(path.name for path in killed.iterdir()) == ["metrics.jsonl", "samples.jsonl"]


def test_a_fresh_start_writes_the_first_validation_once(tmp_path: Path) -> None:
    _run(tmp_path, 0, 1)
    _run(tmp_path, 0, 2)
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2]


def test_each_line_is_there_when_the_hook_returns(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path, {})
    tracker.on_metrics(None, 1, {"a": 1.0})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "a": 1.0}\n'
    tracker.on_checkpoint_saved(None, 1, tmp_path)
    tracker.close()
    tracker.close()


def test_unreadable_line_stops_a_resume_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    content = '{"step": 1}\nnonsense\n{"step": 2}\n'
    path.write_text(content)
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2"):
        drop_after(path, 1)
    assert path.read_text() == content
    assert [item.name for item in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), np.float32("nan")])
def test_not_finite_is_null(value: float) -> None:
    line = encode_record(3, {"a": value, "nested": {"b": [value, 1.5]}}).decode()
    assert _strict(line) == {"step": 3, "a": None, "nested": {"b": [None, 1.5]}}


def test_values_that_are_not_plain() -> None:
    values = {"f": np.float32(0.5), "i": np.int64(3), "a": np.arange(2), "p": Path("x"), "t": (1, None), "b": True}
    assert _strict(encode_record(1, values).decode()) == {
        "step": 1, "f": 0.5, "i": 3, "a": [0, 1], "p": "x", "t": [1, None], "b": True,
    }  # fmt: skip
    assert _strict(encode_record(1, {"step": 99}).decode()) == {"step": 1}
    with pytest.raises(TypeError, match="object has no JSON form"):
        encode_record(1, {"x": object()})


def test_text_stays_readable_and_on_one_line() -> None:
    text = "多\u2028x\ny\udc80"
    line = encode_record(1, {"response": text})
    assert line.count(b"\n") == 1
    assert "多".encode() in line
    assert json.loads(line)["response"] == text


def test_full_disk_is_an_error_that_names_the_file_and_leaves_no_part(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = RecordWriter(path, 0)
    writer.append(1, {"a": 1.0})
    real = writer._file

    class Full:
        def write(self, data: memoryview) -> int:
            if len(data) < 10:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real.write(data[:5])

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    writer._file = Full()  # type: ignore[assignment]
    with pytest.raises(OSError, match=r"No space left on device.*metrics\.jsonl") as caught:
        writer.append(2, {"a": 2.0})
    assert caught.value.errno == errno.ENOSPC
    assert path.read_text() == '{"step": 1, "a": 1.0}\n'
    writer._file = real
    writer.close()
