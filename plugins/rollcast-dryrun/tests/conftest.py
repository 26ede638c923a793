"""A process with the mock for each module of tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollcast_dryrun.native import find_compiler
from rollcast_dryrun.process import MockProcess


@pytest.fixture(scope="module")
def mock_process() -> Iterator[MockProcess]:
    if find_compiler() is None:
        pytest.skip("a dry run needs a C++ compiler")
    with MockProcess([Path(__file__).parent]) as process:
        yield process
