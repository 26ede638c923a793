"""Fixtures of the tests that run whole commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from run_commands import Commands, Finished


@pytest.fixture
def rollcast(tmp_path: Path) -> Commands:
    return Commands(tmp_path)


@pytest.fixture(scope="module")
def rollcast_of_module(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    return Commands(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def assert_refused(rollcast: Commands) -> Callable[..., Finished]:
    """Runs a command that must end with exit code 2 and one message that holds all the words."""

    def check(*arguments: str, says: Sequence[str], timeout: float = 240.0) -> Finished:
        finished = rollcast.run(*arguments, timeout=timeout)
        assert finished.code == 2, finished.out + finished.err
        assert "Traceback" not in finished.text, finished.text
        for word in says:
            assert word in finished.text, f"{word!r} is not in: {finished.text}"
        return finished

    return check
