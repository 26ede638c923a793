"""The engine of docs/engines.md: built, installed beside everything else, and held to its suite."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_packages import PagePackage

pytestmark = pytest.mark.long


def test_passes_the_suite(tmp_path: Path) -> None:
    assert PagePackage("engines.md", "rollcast-small", tmp_path).count_passed(timeout=280) > 40
