"""Commands of plugins, found by name in ``rollcast.commands``."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]

TYPER = """
    import typer
    from rollcast.errors import ConfigError

    app = typer.Typer(help="Say things.")

    @app.command()
    def hello(name: str, loud: bool = False, number: int = 0) -> None:
        typer.echo(f"hello {name} {loud} {number}")

    @app.command()
    def refuse() -> None:
        raise ConfigError("this is [refused]")

    one = typer.Typer()

    several = typer.Typer()

    @several.callback(no_args_is_help=True)
    def about() -> None:
        '''Do several things.

        One after the other.
        '''

    @several.command()
    def first() -> None:
        '''Do the first.'''

    @several.command("other")
    def second() -> None:
        '''Do the second.'''

    @one.command()
    def only(words: list[str]) -> None:
        '''The only command.'''
        typer.echo("|".join(words))
"""


@pytest.fixture
def speaker(make_dist: Callable[..., Path]) -> Path:
    points = {
        "tp_say": "tp_say:app",
        "tp_one": "tp_say:one",
        "tp_several": "tp_say:several",
        "tp_broken": "tp_say_broken:app",
        "tp_odd": "tp_say:hello",
        "version": "tp_say:one",
    }
    return make_dist(
        "tp-say",
        {"rollcast.commands": points},
        {"tp_say.py": TYPER, "tp_say_broken.py": "raise RuntimeError('half built')"},
        version="0.4",
    )


def test_help_shows_their_help_lines_without_importing(run_apart: Run, speaker: Path) -> None:
    source = (speaker / "tp_say.py").read_text()
    (speaker / "tp_say.py").write_text(f"{source}\nraise SystemExit('imported')")
    done = run_apart("--help")
    assert done.code == 0
    for name, line in (
        ("tp_say", "Say things."),
        ("tp_one", "The only command."),
        ("tp_several", "Do several things."),
        ("tp_broken", "A command of tp-say"),
    ):
        assert re.search(rf"{name}\s+{line}", done.out), name


def test_help_line_of_a_module_in_a_package(run_apart: Run, make_dist: Callable[..., Path]) -> None:
    files = {
        "tp_pack/__init__.py": "raise SystemExit('imported')",
        "tp_pack/click_command.py": "@click.command()\ndef reverse(word):\n    '''Reverse a word.'''\n",
        "tp_pack/torn.py": "def (",
    }
    points = {"tp_reverse": "tp_pack.click_command:reverse", "tp_torn": "tp_pack.torn:app", "tp_gone": "tp_none.a:b"}
    make_dist("tp-pack", {"rollcast.commands": points}, files, version="2")
    done = run_apart("--help")
    assert re.search(r"tp_reverse\s+Reverse a word\.", done.out)
    for name in ("tp_torn", "tp_gone"):
        assert re.search(rf"{name}\s+A command of tp-pack 2", done.out), name


def test_arguments_go_to_the_command(run: Run, speaker: Path) -> None:
    done = run("tp_say", "hello", "you", "--loud", "--number=3")
    assert (done.code, done.out) == (0, "hello you True 3\n")


@pytest.mark.parametrize(
    ("words", "shown"),
    [(["a", "b"], "a|b"), (["--", "--help", "-x"], "--help|-x"), (["a=b", "[c]"], "a=b|[c]")],
)
def test_arguments_arrive_as_they_are(run: Run, speaker: Path, words: list[str], shown: str) -> None:
    done = run("tp_one", *words)
    assert (done.code, done.out) == (0, shown + "\n")


def test_help_of_a_command_is_its_own(run: Run, speaker: Path) -> None:
    done = run("tp_one", "--help")
    assert done.code == 0
    assert "rollcast tp_one" in done.out
    assert "The only command." in done.out


def test_mistake_in_its_arguments(run: Run, speaker: Path) -> None:
    done = run("tp_say", "hello", "you", "--number=many")
    assert done.code == 2
    assert "--number" in done.err


def test_its_errors_are_shown_like_ours(run: Run, speaker: Path) -> None:
    done = run("tp_say", "refuse")
    assert (done.code, done.err) == (2, "error: this is [refused]\n")
    assert "Traceback" in run("--traceback", "tp_say", "refuse").err


def test_broken_command_breaks_only_itself(run: Run, speaker: Path) -> None:
    done = run("tp_broken", "--help")
    assert done.code == 2
    assert "RuntimeError: half built" in done.err
    assert "tp-say 0.4" in done.err
    assert run("version").code == 0


def test_what_is_no_command_says_so(run: Run, speaker: Path) -> None:
    done = run("tp_odd")
    assert done.code == 2
    assert "neither a typer.Typer nor a click command" in done.err


def test_built_in_commands_cannot_be_taken_over(run: Run, speaker: Path) -> None:
    assert "tp-say  " in run("version").out
    assert "The command 'version' of tp-say 0.4 is left out" in " ".join(run("--help").out.split())


def test_name_that_two_distributions_claim(run: Run, speaker: Path, make_dist: Callable[..., Path]) -> None:
    make_dist("tp-rival", {"rollcast.commands": {"tp_say": "tp_rival:app"}})
    done = run("tp_say", "hello", "you")
    assert done.code == 2
    assert "tp-rival" in done.err
    assert "tp-say" in done.err


def test_click_command(run: Run, make_dist: Callable[..., Path]) -> None:
    pytest.importorskip("click")
    source = """
        import click

        @click.command()
        @click.argument("word")
        def command(word):
            click.echo(word[::-1])
    """
    make_dist("tp-click", {"rollcast.commands": {"tp_click": "tp_click:command"}}, {"tp_click.py": source})
    done = run("tp_click", "abc")
    assert (done.code, done.out) == (0, "cba\n")


# -- names that nothing provides ----------------------------------------------------------------


def test_an_unknown_command_imports_no_plugin(run_apart: Run, make_dist: Callable[..., Path]) -> None:
    points = {"rollcast.hooks": {"tp_wave": "tp_wave"}, "rollcast.commands": {"tp_wave": "tp_wave:app"}}
    make_dist("tp-wave", points, {"tp_wave.py": "raise SystemExit('imported')"})
    done = run_apart("tp_nothing")
    assert done.code == 2
    assert "No such command 'tp_nothing'" in done.err
