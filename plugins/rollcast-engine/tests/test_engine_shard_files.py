"""Shards are summed while they are written, and an index of a checkpoint runs no code."""

from __future__ import annotations

import io
import json
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from rollcast.errors import CheckpointError
from rollcast_engine import checkpoint_files
from rollcast_engine.checkpoint_files import SHARDS, check_shards, write_sums
from rollcast_engine.metadata import read_metadata
from rollcast_engine.shard_files import CheckedReader, SummingWriter

STATE = {"model": {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}}


def save(path: Path, asynchronous: bool = False) -> SummingWriter:
    (path / "sums").mkdir(parents=True)
    writer = SummingWriter(path / SHARDS)
    if asynchronous:
        dcp.async_save(STATE, storage_writer=writer, no_dist=True).result()  # type: ignore[attr-defined]
    else:
        dcp.save(STATE, storage_writer=writer, no_dist=True)  # type: ignore[attr-defined]
    return writer


@pytest.mark.filterwarnings("ignore:.*(TypedStorage is deprecated|single process).*")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_sums_are_those_of_the_files_and_nothing_is_read_again(
    tmp_path: Path, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = save(tmp_path, asynchronous)
    contents = {file.name: file.read_bytes() for file in (tmp_path / SHARDS).iterdir()}
    assert {".metadata", "__0_0.distcp"} <= contents.keys()
    assert writer.sums == {name: (len(content), zlib.crc32(content)) for name, content in contents.items()}

    def read(file: Path) -> int:
        raise AssertionError(f"{file} is read")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files, "_checksum", read)
        write_sums(tmp_path, 0, writer.sums)
    written = (tmp_path / "sums" / "rank_0.json").read_text()
    write_sums(tmp_path, 0)
    assert json.loads(written) == json.loads((tmp_path / "sums" / "rank_0.json").read_text())
    check_shards(tmp_path, 1, 0, 1)
    loaded = {"model": {name: torch.zeros_like(tensor) for name, tensor in STATE["model"].items()}}
    dcp.load(loaded, storage_reader=CheckedReader(tmp_path / SHARDS), no_dist=True)  # type: ignore[attr-defined]
    assert all(torch.equal(loaded["model"][name], tensor) for name, tensor in STATE["model"].items())


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


@pytest.mark.filterwarnings("ignore:.*(TypedStorage is deprecated|single process).*")
@pytest.mark.parametrize("hidden", [False, True])
def test_an_index_that_names_code_is_not_run(tmp_path: Path, hidden: bool) -> None:
    """Also one that is put in place after the check, and one that hides the code in a valid index."""
    save(tmp_path)
    file, made = tmp_path / SHARDS / ".metadata", tmp_path / "made"
    content: Any = Evil(made)
    if hidden:
        content = read_metadata(file)
        content.planner_data = {"x": Evil(made)}
    file.write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointError, match=r"names posix\.mkdir, which does not belong in an index"):
        read_metadata(file)
    state = {"model": {"a": torch.zeros(3, 4)}}
    with pytest.raises(CheckpointException, match=r"names posix\.mkdir"):
        dcp.load(state, storage_reader=CheckedReader(tmp_path / SHARDS), no_dist=True)  # type: ignore[attr-defined]
    assert not made.exists()


@pytest.mark.filterwarnings("ignore:.*(TypedStorage is deprecated|single process).*")
def test_a_shard_that_is_code_is_not_run(tmp_path: Path) -> None:
    """torch reads shards with weights_only; this holds it to that."""
    save(tmp_path)
    shard = tmp_path / SHARDS / "__0_0.distcp"
    evil = io.BytesIO()
    torch.save(Evil(tmp_path / "made"), evil)
    shard.write_bytes(evil.getvalue().ljust(shard.stat().st_size, b"\0"))
    state = {"model": {"a": torch.zeros(3, 4)}}
    with pytest.raises(CheckpointException, match="Weights only load failed"):
        dcp.load(state, storage_reader=CheckedReader(tmp_path / SHARDS), no_dist=True)  # type: ignore[attr-defined]
    assert not (tmp_path / "made").exists()
