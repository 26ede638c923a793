"""Tools for tests that run rollcast as a person does: by its command, in a process of its own.

The process is a fork of one that has imported the libraries (:mod:`warm_process`), except for :meth:`Commands.start`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from warm_process import ROLLCAST, WarmProcess

_warm = WarmProcess()
#: The quick start without its warm-up and at a size that takes seconds.
SMALL = (
    "recipe=quickstart",
    "trainer.warm_start=null",
    "model.random_init=true",
    "data.train_batch_size=8",
    "data.val_max_samples=16",
    "actor.ppo_mini_batch_size=4",
    "rollout.n=4",
    "trainer.test_freq=2",
    "trainer.save_freq=2",
    "trainer.export=false",
)


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Everything that it said, with line breaks folded: a terminal may wrap a message anywhere."""
        return " ".join((self.out + "\n" + self.err).split())


@dataclass(frozen=True)
class Commands:
    """Runs ``rollcast`` in a folder of its own."""

    folder: Path

    def environment(self) -> dict[str, str]:
        added = {"COLUMNS": "400", "OMP_NUM_THREADS": "1", "RAY_ADDRESS": "", "PYTHONPATH": str(self.site)}
        return {**os.environ, **added}

    @property
    def site(self) -> Path:
        """A folder on the path of the commands, for distributions made by :meth:`install`."""
        return self.folder / "site"

    def install(self, name: str, module: str, source: str, entry_points: str) -> None:
        """Put a distribution of one module where the commands find it."""
        info = self.site / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entry_points)
        (self.site / f"{module}.py").write_text(source)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start the installed script."""
        return subprocess.Popen(
            [str(ROLLCAST), *arguments],
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell's background job ignores SIGINT, and its children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, *arguments: str, timeout: float = 240.0) -> Finished:
        code, out, err = _warm.run(arguments, self.folder, self.environment(), timeout)
        if code is None:
            pytest.fail(f"rollcast {' '.join(arguments)} did not end within {timeout:g} s:\n{out}\n{err}")
        return Finished(code, out, err)

    def must_run(self, *arguments: str, timeout: float = 240.0) -> Finished:
        finished = self.run(*arguments, timeout=timeout)
        assert finished.code == 0, finished.out + finished.err
        return finished


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl``."""
    file = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def without_times(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What must repeat exactly: everything but wall times and rates."""

    def repeats(key: str) -> bool:
        return not (key.startswith(("time/", "perf/")) or key.endswith(("_per_s", "/seconds")))

    return [{key: value for key, value in row.items() if repeats(key)} for row in rows]
