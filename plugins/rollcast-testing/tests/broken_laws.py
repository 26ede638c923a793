"""Run a suite's tests outside of pytest's collection, and return those that fail."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

__all__ = ["broken_laws"]


def broken_laws(suite: Any, fixtures: Mapping[str, Any] | Callable[[Path], Mapping[str, Any]]) -> dict[str, str]:
    """Return the names of the tests that fail, without ``test_``, each with its message.

    Args:
        suite: an instance of a suite.
        fixtures: value of each argument of the tests by name, or a function that builds them in a test's folder.
    """
    broken = {}
    for name in [each for each in dir(suite) if each.startswith("test_")]:
        test = getattr(suite, name)
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            given = {"tmp_path": Path(folder), "monkeypatch": patch}
            given |= fixtures(Path(folder)) if callable(fixtures) else fixtures
            patch.chdir(folder)
            try:
                test(**{argument: given[argument] for argument in inspect.signature(test).parameters})
            except pytest.skip.Exception:
                continue
            except (Exception, pytest.fail.Exception) as error:
                broken[name.removeprefix("test_")] = f"{type(error).__name__}: {error}"
    return broken
