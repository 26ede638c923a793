"""Folders for temporary files in which Ray's processes cannot work are refused before it waits for them."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from rollcast.errors import ResourceError
from rollcast_ray.machine import check_temp_dir


@pytest.fixture
def set_temp_dir(monkeypatch: pytest.MonkeyPatch):
    def set_to(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))

    return set_to


def test_inside_the_environment(set_temp_dir, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    set_temp_dir(tmp_path / "venv" / "tmp")
    with pytest.raises(ResourceError, match=r"inside the virtual environment.*Set TMPDIR"):
        check_temp_dir()


def test_too_long(set_temp_dir, tmp_path) -> None:
    set_temp_dir(tmp_path / ("long" * 25))
    with pytest.raises(ResourceError, match="too long a path"):
        check_temp_dir()


def test_usual_folder(set_temp_dir) -> None:
    set_temp_dir(Path("/tmp"))
    check_temp_dir()
