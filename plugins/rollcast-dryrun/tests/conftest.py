"""Processes with the mock, which all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollcast_dryrun.native import find_compiler
from rollcast_dryrun.process import MockProcess


def start(*paths: Path) -> Iterator[MockProcess]:
    if find_compiler() is None:
        pytest.skip("a dry run needs a C++ compiler")
    with MockProcess([Path(__file__).parent, *paths]) as process:
        yield process


@pytest.fixture(scope="session")
def mock_process() -> Iterator[MockProcess]:
    yield from start()


@pytest.fixture(scope="session")
def transformer_engine_folder() -> Path:
    """The folder in which the session dryrun installs Transformer Engine's Python part."""
    folder = os.environ.get("ROLLCAST_TRANSFORMER_ENGINE")
    if folder is None:
        pytest.skip("set ROLLCAST_TRANSFORMER_ENGINE to a folder with Transformer Engine, as 'nox -s dryrun' does")
    return Path(folder)


@pytest.fixture(scope="session")
def transformer_engine_process(transformer_engine_folder: Path) -> Iterator[MockProcess]:
    yield from start(transformer_engine_folder)
