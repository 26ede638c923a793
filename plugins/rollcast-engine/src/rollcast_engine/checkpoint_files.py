"""The files of a checkpoint beside the tensors: what it is, random states, and checksums of the shards."""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from rollcast.errors import CheckpointError
from rollcast_engine.rng import capture_rng

__all__ = [
    "FORMAT",
    "SHARDS",
    "check_shards",
    "describe_failure",
    "make_folder",
    "read_rng",
    "read_summary",
    "require_fit",
    "rng_file",
    "write_sums",
    "write_summary",
]

FORMAT = 1
SHARDS = "shards"
_SUMMARY = "engine.json"
_BLOCK = 8 << 20


def rng_file(path: Path, rank: int) -> Path:
    """Where rank ``rank`` of those that write keeps its random state."""
    return path / "rng" / f"rank_{rank}.pt"


def make_folder(path: Path, rank: int, rng: dict[str, Any] | None = None) -> None:
    """Make the folder, with this rank's random state in it.

    Args:
        path: of the checkpoint.
        rank: this process's.
        rng: its random state, of tensors and numbers; None for what :func:`capture_rng` gives.

    Raises:
        OSError, RuntimeError: it cannot be written.
    """
    for name in ("rng", "sums"):
        (path / name).mkdir(parents=True, exist_ok=True)
    torch.save(capture_rng() if rng is None else rng, rng_file(path, rank))


def read_rng(file: Path) -> dict[str, Any]:
    """A random state.

    Raises:
        CheckpointError: it cannot be read; names the file.
    """
    try:
        state: dict[str, Any] = torch.load(file, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    return state


def write_sums(path: Path, rank: int) -> None:
    """Write down sizes and checksums of the shards that this rank has written (torch names them by rank)."""
    files = sorted((path / SHARDS).glob(f"__{rank}_*"))
    sums = {file.name: [file.stat().st_size, _checksum(file)] for file in files}
    (path / "sums" / f"rank_{rank}.json").write_text(json.dumps(sums), encoding="utf-8")


def check_shards(path: Path, ranks: int, part: int, parts: int) -> None:
    """Hold shards against what was written down of them; one process of ``parts`` looks at its share.

    Args:
        path: of the checkpoint.
        ranks: that wrote it.
        part: of this process.
        parts: processes that share the work.

    Raises:
        CheckpointError: a shard is missing or not as it was written; names the file.
    """
    known: dict[str, Sequence[int]] = {}
    for rank in range(ranks):
        file = path / "sums" / f"rank_{rank}.json"
        try:
            known.update(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"checkpoint {path} is incomplete: {file} cannot be read: {error}") from error
    for name, (size, checksum) in sorted(known.items())[part::parts]:
        shard = path / SHARDS / name
        if not shard.is_file():
            raise CheckpointError(f"checkpoint {path} is incomplete: it lacks {SHARDS}/{name}")
        if shard.stat().st_size != size:
            raise CheckpointError(f"{shard} has {shard.stat().st_size} bytes; {size} were written")
        if _checksum(shard) != checksum:
            raise CheckpointError(f"{shard} is corrupt: its checksum is not that of what was written")


def write_summary(path: Path, engine: str, summary: dict[str, Any]) -> None:
    """Write ``engine.json`` of an engine by its name, by which a checkpoint is complete."""
    text = json.dumps({"format": FORMAT, "engine": engine, **summary}, indent=1)
    (path / _SUMMARY).write_text(text + "\n", encoding="utf-8")


def read_summary(path: Path, engine: str) -> dict[str, Any]:
    """What :func:`write_summary` wrote for that engine.

    Raises:
        CheckpointError: there is no checkpoint, it is incomplete, or of another engine or format.
    """
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint folder {path}")
    file = path / _SUMMARY
    if not file.is_file():
        raise CheckpointError(f"checkpoint {path} is incomplete: it lacks {_SUMMARY}, which is written last")
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(summary, dict) or summary.get("engine") != engine:
        raise CheckpointError(f"{file} is not of the {engine} engine")
    if summary.get("format") != FORMAT:
        raise CheckpointError(f"{file} has format {summary.get('format')}; this version reads format {FORMAT}")
    if not (path / SHARDS / ".metadata").is_file():
        raise CheckpointError(f"checkpoint {path} is incomplete: it lacks {SHARDS}/.metadata")
    return summary


def require_fit(
    path: Path, summary: dict[str, Any], ours: dict[str, Any], has_optimizer: bool, others: Sequence[str] = ()
) -> None:
    """Refuse a checkpoint of another model.

    Args:
        path: of the checkpoint, for the message.
        summary: what :func:`read_summary` gave.
        ours: ``model_type``, and ``parameters``: name → ``[shape, dtype]``, of the engine that is to load it.
        has_optimizer: whether that engine trains.
        others: differences that the engine has found by itself.

    Raises:
        CheckpointError: it does not fit; names the first differences.
    """
    differences: list[str] = []
    if summary["model_type"] != ours["model_type"]:
        differences.append(f"it holds a {summary['model_type']}, the engine a {ours['model_type']}")
    differences += others
    theirs, mine = summary["parameters"], ours["parameters"]
    differences += [
        f"{name}: {_describe(theirs.get(name))} there, {_describe(mine.get(name))} here"
        for name in sorted(theirs.keys() | mine.keys())
        if theirs.get(name) != mine.get(name)
    ]
    if has_optimizer and not summary["has_optimizer"]:
        differences.append("it has no optimizer state")
    if differences:
        shown = "; ".join(differences[:3])
        more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise CheckpointError(f"checkpoint {path} does not fit this engine: {shown}{more}")


def _describe(parameter: list[Any] | None) -> str:
    return "absent" if parameter is None else f"{parameter[1]}{parameter[0]}"


def describe_failure(error: BaseException) -> str:
    """What went wrong, without the tracebacks that torch puts into its message."""
    if not isinstance(error, CheckpointException):
        return str(error)
    return "; ".join(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values())


def _checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
    return checksum
