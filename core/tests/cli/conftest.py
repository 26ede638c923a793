"""A plugin with a trainer that fails in every way, and the command line run in this process."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollcast.plugins import discovery
from rollcast.plugins.registry import find_registries

CODE = """
    import errno
    import os
    import time
    from pathlib import Path

    from rollcast.contracts.trainer import BaseTrainer, RunResult
    from rollcast.errors import CheckpointError, DataError, RewardError, WorkerError

    def fail_in_worker(cause):
        error = WorkerError(f"policy.actor.update failed on rank 1 (node n0): {type(cause).__name__}: {cause}")
        error.group, error.role, error.method, error.rank, error.node = "policy", "actor", "update", 1, "n0"
        error.remote_traceback = "Traceback of the worker: line 1\\n"
        raise error from cause

    class Trainer(BaseTrainer):
        @classmethod
        def launch(cls, config):
            run_dir = Path(config.run_dir)
            for step in range(1, config.trainer.steps + 1):
                (run_dir / "checkpoints" / f"step_{step}").mkdir(parents=True)
            what = config.trainer.what
            if what == "refuse":
                raise DataError("rows.jsonl, line 3: [bold]not JSON[/bold]")
            if what == "worker_refuses":
                fail_in_worker(RewardError("the reward gave nan"))
            if what == "worker_breaks":
                fail_in_worker(ZeroDivisionError("division by zero"))
            if what == "disk":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/full/model.pt")
            if what == "hub":
                raise OSError("no such model")
            if what == "bug":
                raise ZeroDivisionError("an oversight")
            if what == "interrupt":
                raise KeyboardInterrupt
            if what == "wait":
                (run_dir / "waits").touch()
                for _ in range(600):
                    time.sleep(0.1)
            return RunResult(config.trainer.steps, run_dir)
"""
CONF = """
    from rollcast.contracts.config import ConfigSchema, config

    @config
    class Keys:
        name: str = "tp_cli"
        what: str = ""
        steps: int = 0

    SCHEMAS = (ConfigSchema(path="trainer", schema=Keys, group="trainer", option="tp_cli"),)
"""


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def all(self) -> str:
        return self.out + self.err


Run = Callable[..., Done]


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a command sets for its process is taken back after the test."""
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)
    root, before = logging.getLogger(), set(sys.modules)
    handlers, level = list(root.handlers), root.level
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for number, handler in signals.items():
        signal.signal(number, handler)
    os.environ.pop("TQDM_DISABLE", None)
    for name in set(sys.modules) - before:
        if name.startswith("tp_"):
            del sys.modules[name]
    for registry in find_registries():  # another test's distribution may have the same name
        registry._loaded.clear()
    discovery.refresh()


@pytest.fixture
def cli_plugin(make_dist: Callable[..., Path]) -> Path:
    """A trainer called ``tp_cli``."""
    return make_dist(
        "tp-cli",
        {
            "rollcast.configs": {"tp_cli": "tp_cli_conf"},
            "rollcast.trainers": {"tp_cli": "tp_cli_code:Trainer"},
        },
        {
            "tp_cli_code.py": CODE,
            "tp_cli_conf/__init__.py": CONF,
            "tp_cli_conf/trainer/tp_cli.yaml": "# @package trainer\nname: tp_cli\nwhat: ''\nsteps: 0\n",
        },
        version="3.1",
    )


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run ``rollcast`` in this process, in an empty folder."""
    from rollcast.cli.app import build_app

    folder = tmp_path / "cwd"
    folder.mkdir(exist_ok=True)  # a test may have put something into it
    monkeypatch.chdir(folder)

    def call(*arguments: str) -> Done:
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            build_app()(args=list(arguments), prog_name="rollcast")
        code = caught.value.code
        return Done(0 if code is None else int(code), *capfd.readouterr())

    return call


@pytest.fixture
def run_apart(tmp_path: Path) -> Run:
    """Run ``python -m rollcast`` in a process of its own, with what this one has on its path."""

    def call(*arguments: str, python: tuple[str, ...] = ("-m", "rollcast")) -> Done:
        done = subprocess.run(
            [sys.executable, *python, *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return call
