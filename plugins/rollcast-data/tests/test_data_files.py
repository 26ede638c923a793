from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from rollcast.errors import DataError
from rollcast_data.files import Row, expand_files, read_files, read_rows, write_jsonl, write_parquet

ROWS = [
    {"prompt": [{"role": "user", "content": "é\u2028?"}], "ground_truth": "4", "n": 1},
    {"prompt": [{"role": "system", "content": "be"}, {"role": "user", "content": "x"}], "ground_truth": "5", "n": 2},
]


@pytest.mark.parametrize(("writer", "name"), [(write_jsonl, "a.jsonl"), (write_parquet, "a.parquet")])
def test_written_rows_are_read_back(tmp_path: Path, writer: Callable[..., int], name: str) -> None:
    path = tmp_path / "new" / name
    assert writer(path, iter(ROWS)) == 2
    rows = read_rows(path)
    assert [dict(row.values) for row in rows] == ROWS
    assert [row.number for row in rows] == [1, 2]
    assert rows[1].location == f"{path}:2"
    assert [each.name for each in path.parent.iterdir()] == [name]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


@pytest.mark.parametrize(("writer", "name"), [(write_jsonl, "a.jsonl"), (write_parquet, "a.parquet")])
def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, writer: Callable[..., int], name: str) -> None:
    path = tmp_path / name
    writer(path, ROWS)
    before = path.read_bytes()
    with pytest.raises(DataError, match=name):
        writer(path, [{"x": 1}, {"x": object()}])
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_jsonl_refuses_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"row 1 .* cannot be written as JSON"):
        write_jsonl(tmp_path / "a.jsonl", [{"x": float("nan")}])


def test_many_files_and_globs_keep_their_order(write_rows: Callable[..., Path], tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write_rows([{"name": name}], f"{name}.jsonl")
    (tmp_path / "d.jsonl").mkdir()
    files: list[str | Path] = [tmp_path / "c.jsonl", str(tmp_path / "[ab].jsonl")]
    assert [row.values["name"] for row in read_files(files)] == ["c", "a", "b"]
    assert len(expand_files([tmp_path / "*.jsonl"])) == 3


def test_a_name_that_looks_like_a_glob_is_a_name_first(write_rows: Callable[..., Path]) -> None:
    assert len(read_files([write_rows([{"x": 1}], "rows[1].jsonl")])) == 1


def test_missing_files(write_rows: Callable[..., Path], tmp_path: Path) -> None:
    write_rows([{}], "train.jsonl")
    with pytest.raises(DataError, match=r"trian\.jsonl does not exist; the nearest name in .* is train\.jsonl"):
        expand_files([tmp_path / "trian.jsonl"])
    with pytest.raises(DataError, match=r"does not exist; files in .*: train\.jsonl"):
        expand_files([tmp_path / "zzz"])
    with pytest.raises(DataError, match="there is no folder"):
        expand_files([tmp_path / "nowhere" / "a.jsonl"])
    with pytest.raises(DataError, match="no file matches"):
        expand_files([tmp_path / "*.parquet"])
    with pytest.raises(DataError, match="is a folder"):
        expand_files([tmp_path])
    with pytest.raises(DataError, match="no data files are given"):
        expand_files([])


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_empty_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.jsonl holds no rows"):
        read_rows(path)


def test_parquet_without_rows_or_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, [])
    with pytest.raises(DataError, match="holds no rows"):
        read_rows(path)
    path.write_bytes(b"not parquet")
    with pytest.raises(DataError, match="does not open as Parquet"):
        read_rows(path)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"x": 1', "not JSON"),
        (b"\xff\xfe\xfa", "not JSON"),
        (b"[1, 2]", "a JSON object, this is list"),
        (b"3", "a JSON object, this is int"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: bytes, complaint: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"x": 1}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"a\.jsonl:3: .*{complaint}"):
        read_rows(path)


def test_unknown_extension(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x")
    with pytest.raises(DataError, match=r"'\.csv'; known ones: \.jsonl, \.json, \.parquet"):
        read_rows(path)


def test_columns() -> None:
    row = Row({"a": 1, "b": {"c": 2}, "x.y": 3, "none": None}, Path("f.jsonl"), 7)
    assert (row.get("a"), row.get("b.c"), row.get("x.y")) == (1, 2, 3)
    assert row.find("b.d", "default") == "default"
    with pytest.raises(DataError, match=r"f\.jsonl:7: .*no column 'q' \(data\.prompt_key\).*a, b, x\.y, none"):
        row.get("q", "data.prompt_key")
    with pytest.raises(DataError, match="null in column 'none'"):
        row.get("none")


@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_file_is_a_list_or_lines(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "rows.json"
    for text in (json.dumps(ROWS, indent=indent), "\n" + "".join(json.dumps(row) + "\n" for row in ROWS)):
        path.write_text(text)
        rows = read_rows(path)
        assert [dict(row.values) for row in rows] == ROWS
        assert rows[1].location.startswith(f"{path}:")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[{"a": 1}, 2]', r"rows\.json:2: a row has to be a JSON object, this is int"),
        ('[{"a": 1},', r"rows\.json: not JSON"),
        ('[{"a": "\\ud800"}]', r"rows\.json:1: the row has a lone surrogate"),
        ("[]", r"rows\.json holds no rows"),
        ("[" * 500 + "]" * 500, r"nested more than 100 levels deep"),
    ],
)
def test_bad_json_lists(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(DataError, match=complaint):
        read_rows(tmp_path / "rows.json")


def test_a_name_of_the_hub_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"hf download trl-lib/tldr --repo-type dataset --local-dir tldr"):
        expand_files(["trl-lib/tldr"])
    with pytest.raises(DataError) as caught:
        expand_files(["data/train.jsonl"])
    assert "hf download" not in str(caught.value)
