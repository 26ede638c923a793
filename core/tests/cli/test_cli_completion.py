"""Shell completion: commands, options of plugins' commands, and overrides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Complete = Callable[..., list[str]]

COMMAND = """
    from typing import Annotated
    import typer
    from rollcast.contracts.command import Overrides

    app = typer.Typer(add_completion=False)

    @app.command()
    def act(overrides: Overrides = None, fast: Annotated[bool, typer.Option("--fast")] = False) -> None:
        '''Act.'''
"""


@pytest.fixture
def complete(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    cli_plugin: Path,
    make_dist: Callable[..., Path],
) -> Complete:
    """Return what bash is offered behind some words; the last one is under the cursor."""
    from rollcast.cli.app import build_app

    points = {"tp-act": "tp_act:app", "tp-bad": "tp_no_such:app"}
    make_dist("tp-act", {"rollcast.commands": points}, {"tp_act.py": COMMAND})

    def call(*words: str) -> list[str]:
        monkeypatch.setenv("_ROLLCAST_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", " ".join(("rollcast", *words)))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        capfd.readouterr()
        with pytest.raises(SystemExit):
            build_app()(prog_name="rollcast")
        return capfd.readouterr().out.split()

    return call


def test_commands_of_plugins(complete: Complete) -> None:
    assert complete("tp-a") == ["tp-act"]
    assert complete("doc") == ["doctor"]


def test_options_of_a_plugins_command(complete: Complete) -> None:
    assert complete("tp-act", "--f") == ["--fast"]
    assert complete("tp-bad", "--f") == []


@pytest.mark.parametrize("command", ["train", "tp-act"])
def test_options_of_a_group(complete: Complete, command: str) -> None:
    assert "trainer=tp_cli" in complete(command, "trai")
    assert complete(command, "trainer=tp_c") == ["trainer=tp_cli"]
    # As bash splits the words.
    assert complete(command, "trainer", "=", "tp_c") == ["tp_cli"]
    assert "tp_cli" in complete(command, "trainer", "=")


def test_keys_with_their_values(complete: Complete) -> None:
    chosen = ("train", "trainer", "=", "tp_cli", "runtime=local")
    assert complete(*chosen, "trainer.st") == ["trainer.steps=0"]
    assert complete(*chosen, "trainer.w") == ["trainer.what="]
    assert complete("train", "trainer=nothing", "trainer.st") == []


def test_plugins_that_a_key_may_name(complete: Complete) -> None:
    assert "local" in complete("train", "runtime.name", "=", "lo")


def test_it_can_be_installed(run: Any) -> None:
    assert "--install-completion" in run("--help").out
