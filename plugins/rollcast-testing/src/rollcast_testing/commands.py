"""The conformance suites of commands and of hooks, classes of pytest tests to inherit.

Example, in a plugin's tests::

    from rollcast_testing import CommandSuite, HooksSuite

    class TestGreet(CommandSuite):
        name = "greet"

    class TestBell(HooksSuite):
        name = "bell"
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rollcast.contracts.hooks import build_hook_manager, find_hook_mistake, hooks
from rollcast_testing.laws import require

__all__ = ["CommandSuite", "HooksSuite"]


class CommandSuite:
    """Conformance tests of one command, in processes of their own; set :attr:`name`."""

    #: Name of the command in ``rollcast.commands``.
    name: ClassVar[str] = ""
    #: Arguments of a call that the command refuses with a message.
    bad_arguments: ClassVar[Sequence[str]] = ("--an-option-that-nobody-has",)
    #: Arguments of its sub-commands; each call ``rollcast <name> <arguments> --help`` shows a help text.
    sub_commands: ClassVar[Sequence[Sequence[str]]] = ()

    def run(self, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run ``rollcast`` with arguments."""
        command = [sys.executable, "-m", "rollcast", *arguments]
        environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)  # noqa: S603

    def test_rollcast_help_has_its_line(self, tmp_path: Path) -> None:
        """Check that the list of commands has a line about this one, which is read without importing the plugin."""
        done = self.run("--help", cwd=tmp_path)
        found = re.search(rf"^\W*{re.escape(self.name)}\s+(\S.*?)\W*$", done.stdout, re.MULTILINE)
        require(found is not None, f"rollcast --help lists {self.name}:\n{done.stdout}")
        line = found[1] if found else ""
        law = f"its line is the command's own help, not {line!r}: give the function, or the callback, a docstring"
        require(not line.startswith("A command of "), law)

    def test_it_has_a_help_text(self, tmp_path: Path) -> None:
        for arguments in ((), *self.sub_commands):
            done = self.run(self.name, *arguments, "--help", cwd=tmp_path)
            words = " ".join(("rollcast", self.name, *arguments, "--help"))
            require(done.returncode == 0, f"{words} ends with 0, not {done.returncode}: {done.stderr}")
            require("Usage:" in done.stdout, f"{words} shows the usage:\n{done.stdout}")
        require(not list(tmp_path.iterdir()), "--help writes nothing")

    def test_a_wrong_call_is_one_message(self, tmp_path: Path) -> None:
        done = self.run(self.name, *self.bad_arguments, cwd=tmp_path)
        text = done.stdout + done.stderr
        require(done.returncode == 2, f"a wrong call ends with 2, not {done.returncode}: {text}")
        require("Traceback" not in text, f"a wrong call shows no traceback: {text}")
        require(bool(text.strip()), "a wrong call says what is wrong")


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
