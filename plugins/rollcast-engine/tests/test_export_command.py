"""``rollcast export``: a checkpoint into a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from rollcast.cli.app import build_app
from rollcast.contracts.engine import BaseEngine, ModelConfig, engines

Run = Callable[..., Result]


class Engine(BaseEngine):
    """Enough of an engine to be exported from."""

    @classmethod
    def export_checkpoint(cls, checkpoint: Path, model: ModelConfig, output: Path) -> None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "model").write_text(f"{checkpoint.name} {model.path} {model.attn_implementation}")


registered: Any = Engine
registered.__abstractmethods__ = frozenset()  # the rest is never called here


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run ``rollcast`` in an empty folder, with an engine in the registry."""
    folder = tmp_path / "cwd"
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TQDM_DISABLE", "1")
    engines.register("tp_cli", registered)
    yield lambda *arguments: CliRunner().invoke(build_app(), list(arguments))
    engines.unregister("tp_cli")


def test_help_and_usage(run: Run) -> None:
    done = run("export", "--help")
    assert done.exit_code == 0
    assert "rollcast export" in done.stdout
    assert "--traceback" in done.stdout
    assert "OUTPUT" in run("export", "here").stderr


def test_traceback_is_shown_when_it_is_asked_for(run: Run) -> None:
    assert "Traceback" not in run("export", "nowhere", "out").stderr
    assert "Traceback" in run("export", "nowhere", "out", "--traceback").stderr


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "cwd" / "runs" / "old" / "checkpoints" / "step_3"
    (folder / "actor").mkdir(parents=True)
    (folder.parent / "step_12" / "actor").mkdir(parents=True)
    (tmp_path / "cwd" / "runs" / "old" / "config.yaml").write_text(
        "run_dir: runs/first\nmodel:\n  path: runs/first/task/model\n  attn_implementation: eager\n"
        "actor:\n  engine:\n    name: tp_cli\n"
    )
    return folder


def test_export_hands_the_engine_what_it_needs(run: Run, checkpoint: Path) -> None:
    done = run("export", "runs/old/checkpoints/step_3", "out/new")
    assert done.exit_code == 0, done.stderr
    # The run was called runs/first when it ran, and has been moved since.
    moved = checkpoint.parent.parent / "task" / "model"
    assert Path("out/new/model").read_text() == f"actor {moved} eager"


def test_export_keeps_a_model_path_that_exists(run: Run, checkpoint: Path) -> None:
    Path("runs/first/task/model").mkdir(parents=True)
    assert run("export", "runs/old/checkpoints/step_3", "out").exit_code == 0
    assert Path("out/model").read_text() == "actor runs/first/task/model eager"


def test_export_with_a_config_of_its_own(run: Run, checkpoint: Path) -> None:
    Path("mine.yaml").write_text("model:\n  path: /m\nactor:\n  engine:\n    name: tp_cli\n")
    assert run("export", "runs/old/checkpoints/step_3", "out", "--config", "mine.yaml").exit_code == 0
    assert Path("out/model").read_text() == "actor /m sdpa"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["runs/old", "out"], "did you mean runs/old/checkpoints/step_12?"),
        (["runs/old/checkpoints/step_4", "out"], "step_4 does not exist; did you mean runs/old/checkpoints/step_12?"),
        (["nowhere", "out"], "nowhere does not exist; a checkpoint is a folder RUN_DIR/checkpoints/step_N"),
        (["runs/old/checkpoints/step_3", "runs"], "runs exists and is not an empty folder"),
        (["runs/old/checkpoints/step_3", "out", "--config", "none.yaml"], "none.yaml cannot be read"),
        (["runs/old/checkpoints/step_3", "out", "--config", "list.yaml"], "list.yaml is not a mapping"),
        (["runs/old/checkpoints/step_3", "out", "--config", "torn.yaml"], "torn.yaml cannot be read"),
        (["runs/old/checkpoints/step_3", "out", "--config", "bare.yaml"], "bare.yaml has no actor.engine.name"),
        (["runs/old/checkpoints/step_3", "out", "--config", "model.yaml"], "model.path must be set; model.yaml"),
        (["runs/old/checkpoints/step_3", "out", "--config", "other.yaml"], "actor.engine.name (other.yaml)"),
    ],
)
def test_export_refuses(run: Run, checkpoint: Path, arguments: list[str], says: str) -> None:
    Path("list.yaml").write_text("- 1\n")
    Path("torn.yaml").write_text("a: [\n")
    Path("bare.yaml").write_text("model:\n  path: x\n")
    Path("model.yaml").write_text("model:\n  random_init: true\nactor:\n  engine:\n    name: tp_cli\n")
    Path("other.yaml").write_text("model:\n  path: x\nactor:\n  engine:\n    name: tp_clii\n")
    done = run("export", *arguments)
    assert done.exit_code == 2
    assert says in done.stderr
    assert not Path("out").exists()
