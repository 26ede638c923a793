"""Processes in which torch believes in CUDA devices: functions are called there by name, with JSON in and out."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable
from importlib import import_module
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from rollcast.errors import RollcastError
from rollcast_dryrun.native import load_mock
from rollcast_dryrun.transformer_engine import load_transformer_engine

__all__ = ["MockProcess"]

#: Start of the lines that are results, beside what libraries print.
_MARK = "rollcast-dryrun: "


class MockProcess:
    """A process with the mock, which calls functions one after the other; a context manager that ends it.

    Args:
        paths: folders that the process adds to ``sys.path``.
    """

    def __init__(self, paths: Iterable[Path] = ()) -> None:
        self._calls = count()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by __exit__
        self._process = subprocess.Popen(  # noqa: S603  # this Python
            [sys.executable, "-m", "rollcast_dryrun.process", *map(str, paths)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def call(self, function: str, *arguments: Any) -> Any:
        """Return a function's result.

        Args:
            function: ``module:name`` of the function.
            arguments: its arguments; they and the result are values of JSON.

        Raises:
            RollcastError: the function raised, or the process ended; the message has the traceback or its last lines.
        """
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the process has no pipes")
        number = next(self._calls)
        self._process.stdin.write(f"{json.dumps([number, function, arguments])}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(_MARK):
                answered, answer = json.loads(line.removeprefix(_MARK))
                if answered != number:
                    continue  # of a call that was interrupted here, and went on there
                if answer.get("explained"):
                    raise RollcastError(answer["error"])
                if "error" in answer:
                    raise RollcastError(f"{function} failed in the dry run: {answer['error']}")
                return answer["result"]
        self._errors.seek(0)
        last = "".join(self._errors.readlines()[-30:])
        raise RollcastError(f"the process of the dry run ended with code {self._process.wait()}:\n{last}")

    def __enter__(self) -> MockProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()


def _answer(function: str, arguments: list[Any]) -> dict[str, Any]:
    module, _, name = function.partition(":")
    try:
        return {"result": getattr(import_module(module), name)(*arguments)}
    except RollcastError as error:  # its message says what to do
        return {"error": str(error), "explained": True}
    except Exception as error:  # noqa: BLE001  # whatever it is, the caller raises it
        return {"error": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}


def _prepare(paths: Iterable[str]) -> dict[str, Any] | None:
    """Load the mock and what it has to come before; return the answer to every call if that fails."""
    try:
        load_mock()
        sys.path[:0] = paths
        load_transformer_engine()
    except RollcastError as error:
        return {"error": str(error), "explained": True}
    return None


def _main(paths: Iterable[str]) -> None:
    failure = _prepare(paths)
    frozen = len(sys.modules)
    for line in sys.stdin:
        if len(sys.modules) > frozen:  # new modules stay: collections of engines that were freed need not visit them
            gc.collect()
            gc.freeze()
            frozen = len(sys.modules)
        number, function, arguments = json.loads(line)
        sys.stdout.write(f"{_MARK}{json.dumps([number, failure or _answer(function, arguments)])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main(sys.argv[1:])
