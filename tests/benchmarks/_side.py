"""A benchmark's side in a process of its own: does on each line of its input what that names, and tells how long it took.

Only the standard library, because the other side has an environment of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Side", "peer_version", "serve"]


def serve(actions: Mapping[str, Callable[[], Any]]) -> None:
    """Run the side's loop until its input ends; what the actions write to stdout goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answers.write(json.dumps({"ready": True}) + "\n")
    answers.flush()
    for line in sys.stdin:
        action = actions[line.strip()]
        start = time.perf_counter()
        result = action()
        seconds = time.perf_counter() - start
        del result
        answers.write(json.dumps({"seconds": seconds}) + "\n")
        answers.flush()


def peer_version(python: str, distribution: str) -> str:
    """The version that is installed in the environment of that Python."""
    code = f"from importlib.metadata import version; print(version({distribution!r}))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


class Side:
    """The other end of :func:`serve`.

    Args:
        command: starts the process; it has ``stderr`` as its own.
    """

    def __init__(self, command: Sequence[str], stderr: Path) -> None:
        self._log = stderr
        self._errors = stderr.open("w")
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment
        )
        self._answer()

    def run(self, action: str) -> float:
        """Do it; seconds that it took there."""
        if self._process.stdin is None:
            raise RuntimeError("the side has no input")
        self._process.stdin.write(action + "\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
            raise RuntimeError(f"{self._process.args} ended:\n{tail}")
        return dict(json.loads(line))

    def close(self) -> None:
        """End the process, and wait for it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()
