"""The preprocessors of data sets in verl's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollcast.errors import DataError
from rollcast_data.files import read_rows, write_parquet
from rollcast_data.preprocess.verl_rows import PYTHON_INSTRUCTION, DapoMath, DapoMathWithPython, EurusCode

TESTS = {"inputs": ["1\n"], "outputs": ["1\n"]}


def row(content: str, truth: Any, ability: str = "MATH") -> dict[str, Any]:
    prompt = [{"role": "user", "content": content}]
    return {"data_source": "s", "prompt": prompt, "ability": ability, "reward_model": {"ground_truth": truth}}


def write_math(folder: Path, *rows: dict[str, Any]) -> Path:
    write_parquet(folder / "dapo-math-17k.parquet", rows)
    write_parquet(folder / "aime-2024.parquet", rows[:1])
    return folder


def write_code(folder: Path, *rows: dict[str, Any]) -> Path:
    for split in ("train", "validation"):
        write_parquet(folder / f"{split}-00000-of-00001.parquet", rows)
    return folder


def test_a_repeated_problem_is_written_once(tmp_path: Path) -> None:
    source = write_math(tmp_path, row("a", "1"), row("b", "2"), row("a", "1"))
    assert DapoMath().run(source, tmp_path / "out").rows == {"train.parquet": 2, "test.parquet": 1}
    found = [each.values for each in read_rows(tmp_path / "out" / "train.parquet")]
    assert [(each["prompt"], each["ground_truth"]) for each in found] == [
        ([{"role": "user", "content": "a"}], "1"),
        ([{"role": "user", "content": "b"}], "2"),
    ]


def test_a_system_message_describes_the_tool(tmp_path: Path) -> None:
    DapoMathWithPython().run(write_math(tmp_path, row("a", "1")), tmp_path / "out")
    (found,) = read_rows(tmp_path / "out" / "test.parquet")
    assert [each["content"] for each in found.values["prompt"]] == [PYTHON_INSTRUCTION, "a"]


def test_programs_that_read_standard_input_or_are_called_are_kept(tmp_path: Path) -> None:
    called = json.dumps({**TESTS, "fn_name": "f"})
    source = write_code(tmp_path, row("a", json.dumps(TESTS), "code"), row("b", called, "code"), row("c", "3", "math"))
    report = EurusCode().run(source, tmp_path / "out")
    assert report.rows == {"train.parquet": 2, "test.parquet": 2}
    found, other = read_rows(tmp_path / "out" / "train.parquet")
    assert json.loads(found.values["ground_truth"]) == TESTS
    assert json.loads(other.values["ground_truth"]) == {**TESTS, "fn_name": "f"}
    assert str(tmp_path) not in json.dumps(found.values), "rows of a data set name no folder of the machine"


def test_bad_sources_leave_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"dapo_math needs a source .* dapo-math-17k.parquet and aime-2024.parquet"):
        DapoMath().run(None, tmp_path / "out")
    with pytest.raises(DataError, match=r"dapo-math-17k\.parquet:2: reward_model.ground_truth is empty"):
        DapoMath().run(write_math(tmp_path, row("a", "1"), row("b", " ")), tmp_path / "out")
    with pytest.raises(DataError, match=r"parquet:1: the tests are not JSON: 'assert f'"):
        EurusCode().run(write_code(tmp_path, row("a", "assert f", "code")), tmp_path / "out")
    with pytest.raises(DataError, match=r"parquet:1: the tests have no 'inputs' and 'outputs'"):
        EurusCode().run(write_code(tmp_path, row("a", "{}", "code")), tmp_path / "out")
    assert not (tmp_path / "out").exists()
