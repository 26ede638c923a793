"""The conformance suites of commands and of hooks, classes of pytest tests to inherit.

Example, in a plugin's tests::

    from rollcast_testing import CommandSuite, HooksSuite

    class TestGreet(CommandSuite):
        name = "greet"

    class TestBell(HooksSuite):
        name = "bell"
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar

import pytest
import typer

from rollcast.contracts.hooks import build_hook_manager, find_hook_mistake, hooks
from rollcast.errors import RollcastError
from rollcast_testing.checks import require

__all__ = ["CommandSuite", "HooksSuite"]


class CommandSuite:
    """Conformance tests of one command; set :attr:`name`."""

    #: Name of the command in ``rollcast.commands``.
    name: ClassVar[str] = ""
    #: Arguments of a call that the command refuses with a message.
    bad_arguments: ClassVar[Sequence[str]] = ("--an-option-that-nobody-has",)
    #: Arguments of its sub-commands; each call ``rollcast <name> <arguments> --help`` shows a help text.
    sub_commands: ClassVar[Sequence[Sequence[str]]] = ()

    @pytest.fixture
    def command(self) -> Any:
        """Return the command under test, a Typer application or a click command; by default the plugin :attr:`name`."""
        if not self.name:
            raise NotImplementedError(f"{type(self).__name__} must set `name` or override the fixture `command`")
        entry = [point for point in entry_points(group="rollcast.commands") if point.name == self.name]
        require(len(entry) == 1, f"one distribution announces {self.name} in rollcast.commands, not {len(entry)}")
        return entry[0].load()

    def run(self, command: Any, *arguments: str) -> Any:
        """Call the command in this process; return click's result, with exit code and output."""
        environment = {"COLUMNS": "200", "NO_COLOR": "1"}
        if isinstance(command, typer.Typer):
            from typer.testing import CliRunner

            return CliRunner().invoke(command, list(arguments), env=environment)
        from click.testing import CliRunner as ClickRunner

        return ClickRunner().invoke(command, list(arguments), env=environment)

    def test_rollcast_help_has_its_line(self) -> None:
        """Check that the list of commands has a line about this one, which is read without importing the plugin."""
        listed = _read_help()
        match = re.search(rf"^\W*{re.escape(self.name)}\s+(\S.*?)\W*$", listed, re.MULTILINE)
        require(match is not None, f"rollcast --help lists {self.name}:\n{listed}")
        line = match[1] if match else ""
        law = f"its line is the command's own help, not {line!r}: give the function, or the callback, a docstring"
        require(not line.startswith("A command of "), law)

    def test_it_has_a_help_text(self, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        for arguments in ((), *self.sub_commands):
            done = self.run(command, *arguments, "--help")
            words = " ".join(("rollcast", self.name, *arguments, "--help"))
            require(done.exit_code == 0, f"{words} ends with 0, not {done.exit_code}: {done.output}")
            require("Usage:" in done.output, f"{words} shows the usage:\n{done.output}")
        require(not list(tmp_path.iterdir()), "--help writes nothing")

    def test_a_wrong_call_is_one_message(self, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Check that a wrong call is a usage error, or raises an error that ``rollcast`` shows as a message."""
        monkeypatch.chdir(tmp_path)
        done = self.run(command, *self.bad_arguments)
        is_told = isinstance(done.exception, RollcastError) or done.exit_code == 2
        require(is_told, f"a wrong call is refused with a message, not with {done.exception!r}: {done.output}")
        require(bool(done.output.strip() or str(done.exception)), "a wrong call says what is wrong")


@functools.cache
def _read_help() -> str:
    """Return the list of commands, of a process that imports none of them."""
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "rollcast", "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    require(done.returncode == 0, f"rollcast --help ends with 0, not {done.returncode}: {done.stderr}")
    return done.stdout


class HooksSuite:
    """Conformance tests of an installed listener to the events of a run; set :attr:`name`."""

    #: Name of the listener in ``rollcast.hooks``.
    name: ClassVar[str] = ""

    @pytest.fixture
    def listener(self) -> Any:
        """Return the listener under test; by default the plugin :attr:`name`."""
        if not self.name:
            raise NotImplementedError(f"{type(self).__name__} must set `name` or override the fixture `listener`")
        return hooks.get(self.name, requested_by=f"{type(self).__name__}.name")

    def config(self) -> Any:
        """Return the configuration that ``on_configure`` receives, by default one of ``trainer=ppo``'s shape."""
        from omegaconf import OmegaConf

        return OmegaConf.create({"trainer": {"name": "ppo", "total_steps": 2}, "run_dir": "run"})

    def test_its_hooks_exist(self, listener: Any) -> None:
        mistake = find_hook_mistake(listener)
        require(mistake is None, f"every hook and every argument exists: it {mistake}")

    def test_a_run_that_does_not_concern_it_goes_on(self, listener: Any) -> None:
        """Check that no hook fails in two steps of a run without a trainer's attributes."""
        manager = build_hook_manager([listener], without=hooks.names())
        call = manager.hook
        metrics = {"reward/mean": 0.5, "nan": float("nan")}
        call.on_configure(config=self.config())
        call.on_fit_start(trainer=None)
        for step in (1, 2):
            call.on_step_start(trainer=None, step=step)
            call.on_metrics(trainer=None, step=step, metrics=metrics)
            call.on_step_end(trainer=None, step=step, metrics=metrics)
        call.on_exception(trainer=None, error=ValueError("planted"))
        call.on_fit_end(trainer=None, error=ValueError("planted"))

    def test_two_runs_in_a_process_are_separate(self, listener: Any) -> None:
        for _ in range(2):
            self.test_a_run_that_does_not_concern_it_goes_on(listener)
