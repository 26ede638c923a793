"""``rollcast preprocess``: raw data into the files that a dataset reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from rollcast.cli.app import build_app
from rollcast_data.contract import BasePreprocessor, PreprocessReport, preprocessors

Run = Callable[..., Result]


class Preprocessor(BasePreprocessor):
    """Numbers."""

    def run(self, source: Path | None, output: Path, seed: int = 0) -> PreprocessReport:
        (output / "train.jsonl").write_text(f"{source} {seed}")
        return PreprocessReport({"train.jsonl": 12345, "test.jsonl": 6}, ["a note on [these]"])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run ``rollcast`` in an empty folder, with a preprocessor in the registry."""
    folder = tmp_path / "cwd"
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TQDM_DISABLE", "1")
    preprocessors.register("tp_cli", Preprocessor)
    yield lambda *arguments: CliRunner().invoke(build_app(), list(arguments))
    preprocessors.unregister("tp_cli")


def test_help_and_usage(run: Run) -> None:
    done = run("preprocess", "--help")
    assert done.exit_code == 0
    assert "rollcast preprocess" in done.stdout
    assert "--traceback" in done.stdout
    assert "NAME" in run("preprocess").stderr
    assert "--output" in run("preprocess", "tp_cli").stderr
    assert "--seed" in run("preprocess", "tp_cli", "--output", "x", "--seed", "many").stderr


def test_traceback_is_shown_when_it_is_asked_for(run: Run) -> None:
    assert "Traceback" not in run("preprocess", "tp_cil", "--output", "d").stderr
    assert "Traceback" in run("preprocess", "tp_cil", "--output", "d", "--traceback").stderr


def test_preprocess_counts_rows(run: Run, tmp_path: Path) -> None:
    done = run("preprocess", "tp_cli", "--input", str(tmp_path), "--output", "data/new", "--seed", "7")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines() == [
        "12,345 rows  data/new/train.jsonl",
        "     6 rows  data/new/test.jsonl",
        "a note on [these]",
    ]
    assert Path("data/new/train.jsonl").read_text() == f"{tmp_path} 7"


def test_preprocess_without_input(run: Run) -> None:
    assert run("preprocess", "tp_cli", "--output", "data").exit_code == 0
    assert Path("data/train.jsonl").read_text() == "None 0"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tp_cil", "--output", "d"], ["'tp_cil'", "Did you mean 'tp_cli'?"]),
        (["tp_cli", "--output", "d", "--input", "gone"], ["--input gone"]),
        (["tp_cli", "--output", "file"], ["--output file"]),
    ],
)
def test_preprocess_refuses(run: Run, arguments: list[str], says: list[str]) -> None:
    Path("file").write_text("")
    done = run("preprocess", *arguments)
    assert done.exit_code == 2
    for word in says:
        assert word in done.stderr
    assert not Path("d").exists()
