"""Files that are replaced whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rollcast.contracts.files import replace_file


@pytest.fixture
def synced(monkeypatch) -> list[str]:
    """Kinds of what is synchronized with the disk, and the moment of the rename, in order."""
    seen: list[str] = []
    fsync, rename = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        seen.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def replace(source: Path, target: Path) -> None:
        seen.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    return seen


def test_a_file_and_its_folder_reach_the_disk(tmp_path: Path, synced: list[str]) -> None:
    replace_file(tmp_path / "f", "one")
    assert synced == ["file", "rename", "folder"]
    replace_file(tmp_path / "f", b"two")
    assert (tmp_path / "f").read_bytes() == b"two"
    assert [file.name for file in tmp_path.iterdir()] == ["f"]


def test_the_old_file_stays_where_the_new_one_cannot_be_written(tmp_path: Path, monkeypatch) -> None:
    replace_file(tmp_path / "f", "one")

    def full(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        replace_file(tmp_path / "f", "two")
    assert (tmp_path / "f").read_text() == "one"
    assert [file.name for file in tmp_path.iterdir()] == ["f"]
