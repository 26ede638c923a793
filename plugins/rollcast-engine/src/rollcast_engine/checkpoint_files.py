"""The files of a checkpoint beside the tensors: what it is, random states, and checksums of the shards."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from rollcast.errors import CheckpointError
from rollcast_engine.metadata import check_metadata
from rollcast_engine.rng import capture_rng

__all__ = [
    "FORMAT",
    "SHARDS",
    "check_shards",
    "describe_failure",
    "restore_saved_rng",
    "make_folder",
    "read_rng",
    "read_summary",
    "require_fit",
    "require_values",
    "rng_file",
    "write_sums",
    "write_summary",
]

FORMAT = 1
SHARDS = "shards"
_SUMMARY = "engine.json"
_BLOCK = 8 << 20
#: Files beside the shards that rank 0 writes: torch's index, and what megatron-core adds.
_INDEX = (".metadata", "common.pt", "metadata.json")
#: Types of the values that every engine's summary has.
_VALUES: Mapping[str, type] = {
    "model_type": str,
    "world_size": int,
    "schedule_step": int,
    "has_optimizer": bool,
    "parameters": dict,
}


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
        state = torch.load(file, weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except Exception as error:  # torch's unpickler raises whatever the bytes lead to
        raise CheckpointError(f"{file} is no random state: {_first_line(error)}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{file} is no random state: it holds a {type(state).__name__}")
    return state


def restore_saved_rng(path: Path, state: dict[str, Any], restore: Callable[[dict[str, Any]], None]) -> None:
    """Put the process's random state back by ``restore``.

    Raises:
        CheckpointError: the state is not what was saved; names the checkpoint.
    """
    try:
        restore(state)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {_first_line(error)}"
        raise CheckpointError(f"checkpoint {path} has no usable random state in rng/: {reason}") from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def write_sums(path: Path, rank: int) -> None:
    """Write down sizes and checksums of what this rank has written: its shards, and for rank 0 the index."""
    files = sorted((path / SHARDS).glob(f"__{rank}_*"))
    if rank == 0:
        files += [file for name in _INDEX if (file := path / SHARDS / name).is_file()]
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
        CheckpointError: a shard or its checksum is missing, or the shard is not as it was written; names the file.
    """
    check_metadata(path / SHARDS / ".metadata")
    known: dict[str, Sequence[int]] = {}
    for rank in range(ranks):
        file = path / "sums" / f"rank_{rank}.json"
        known.update(_read_sums(path, file))
    present = {file.name for file in (path / SHARDS).iterdir() if file.name.startswith("__") or file.name in _INDEX}
    unlisted = sorted(present - known.keys())
    if unlisted:
        raise CheckpointError(
            f"checkpoint {path} is incomplete: its sums/ have no checksum of {SHARDS}/{unlisted[0]}"
            + (f" and {len(unlisted) - 1} more" if len(unlisted) > 1 else "")
        )
    for name, (size, checksum) in sorted(known.items())[part::parts]:
        shard = path / SHARDS / name
        if not shard.is_file():
            raise CheckpointError(f"checkpoint {path} is incomplete: it lacks {SHARDS}/{name}")
        if shard.stat().st_size != size:
            raise CheckpointError(f"{shard} has {shard.stat().st_size} bytes; {size} were written")
        if _checksum(shard) != checksum:
            raise CheckpointError(f"{shard} is corrupt: its checksum is not that of what was written")


def _read_sums(path: Path, file: Path) -> dict[str, list[int]]:
    try:
        sums = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {path} is incomplete: {file} cannot be read: {error}") from error
    if not isinstance(sums, dict) or not all(
        isinstance(each, list) and len(each) == 2 and all(type(number) is int for number in each)
        for each in sums.values()
    ):
        raise CheckpointError(f"{file} does not hold a size and a checksum of each shard")
    return sums


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
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(summary, dict) or summary.get("engine") != engine:
        raise CheckpointError(f"{file} is not of the {engine} engine")
    if summary.get("format") != FORMAT:
        raise CheckpointError(f"{file} has format {summary.get('format')}; this version reads format {FORMAT}")
    if not (path / SHARDS / ".metadata").is_file():
        raise CheckpointError(f"checkpoint {path} is incomplete: it lacks {SHARDS}/.metadata")
    require_values(path, summary, _VALUES)
    return summary


def require_values(path: Path, summary: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    """Refuse a summary without the values that an engine reads.

    Raises:
        CheckpointError: one is missing or has another type; names it.
    """
    for key, kind in kinds.items():
        if type(summary.get(key)) is not kind:
            found = f"it has {summary[key]!r:.60}" if key in summary else "it is missing"
            raise CheckpointError(f"{path / _SUMMARY}: {key} has to be a {kind.__name__}; {found}")
    if summary.get("world_size", 1) < 1:
        raise CheckpointError(f"{path / _SUMMARY}: world_size is {summary['world_size']}")


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


def _describe(parameter: Any) -> str:
    if parameter is None:
        return "absent"
    readable = isinstance(parameter, list) and len(parameter) == 2
    return f"{parameter[1]}{parameter[0]}" if readable else f"{parameter!r:.60}"


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
