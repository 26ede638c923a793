"""The files of a checkpoint besides the tensors: its summary, random states, and checksums of the shards."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from rollcast.errors import CheckpointError
from rollcast_engine.metadata import read_metadata
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
#: Files beside the shards that rank 0 writes: torch's index, and those that megatron-core adds.
_INDEX = (".metadata", "common.pt", "metadata.json")
#: Types of the values that every engine's summary contains.
_VALUES: Mapping[str, type] = {
    "model_type": str,
    "world_size": int,
    "schedule_step": int,
    "has_optimizer": bool,
    "parameters": dict,
}


def rng_file(path: Path, rank: int) -> Path:
    """Return the path of the random state of ``rank``."""
    return path / "rng" / f"rank_{rank}.pt"


def make_folder(path: Path, rank: int, rng: dict[str, Any] | None = None) -> None:
    """Create the checkpoint folder and write this rank's random state into it.

    Args:
        path: folder of the checkpoint.
        rank: rank of this process.
        rng: random state of tensors and numbers; None calls :func:`capture_rng`.

    Raises:
        OSError, RuntimeError: it cannot be written.
    """
    for name in ("rng", "sums"):
        (path / name).mkdir(parents=True, exist_ok=True)
    torch.save(capture_rng() if rng is None else rng, rng_file(path, rank))


def read_rng(file: Path) -> dict[str, Any]:
    """Return a saved random state.

    Raises:
        CheckpointError: it cannot be read; the message names the file.
    """
    try:
        state = torch.load(file, weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except Exception as error:  # torch's unpickler can raise any exception on damaged bytes
        raise CheckpointError(f"{file} is not a random state: {_first_line(error)}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{file} is not a random state: it holds a {type(state).__name__}")
    return state


def restore_saved_rng(path: Path, state: dict[str, Any], restore: Callable[[dict[str, Any]], None]) -> None:
    """Restore the process's random state by calling ``restore``.

    Raises:
        CheckpointError: the state cannot be restored; the message names the checkpoint.
    """
    try:
        restore(state)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {_first_line(error)}"
        raise CheckpointError(f"checkpoint {path} has no usable random state in rng/: {reason}") from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def write_sums(path: Path, rank: int, written: Mapping[str, Sequence[int]] | None = None) -> None:
    """Write sizes and checksums of the files that this rank has written: its shards, and the index on rank 0.

    Args:
        path: folder of the checkpoint.
        rank: rank of this process.
        written: size and checksum by file name, from :class:`~rollcast_engine.shard_files.SummingWriter`. Files that
            it lacks are read again.
    """
    known = written or {}
    files = sorted((path / SHARDS).glob(f"__{rank}_*"))
    if rank == 0:
        files += [file for name in _INDEX if (file := path / SHARDS / name).is_file()]
    sums = {file.name: list(known.get(file.name) or (file.stat().st_size, _checksum(file))) for file in files}
    (path / "sums" / f"rank_{rank}.json").write_text(json.dumps(sums), encoding="utf-8")


def check_shards(path: Path, ranks: int, part: int, parts: int) -> None:
    """Compare shards with their recorded sizes and checksums; each of ``parts`` processes checks its share.

    Args:
        path: folder of the checkpoint.
        ranks: number of ranks that wrote the checkpoint.
        part: index of this process among ``parts``.
        parts: processes that share the work.

    Raises:
        CheckpointError: a shard or its checksum is missing, or the shard has changed; the message names the file.
    """
    # Before anything else: an index that names code is refused.
    read_metadata(path / SHARDS / ".metadata")
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
            raise CheckpointError(f"{shard} is corrupt: its checksum differs from the recorded one")


def _read_sums(path: Path, file: Path) -> dict[str, list[int]]:
    try:
        sums = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {path} is incomplete: {file} cannot be read: {error}") from error
    if not isinstance(sums, dict) or not all(
        isinstance(entry, list) and len(entry) == 2 and all(type(number) is int for number in entry)
        for entry in sums.values()
    ):
        raise CheckpointError(f"{file} does not contain a size and a checksum for each shard")
    return sums


def write_summary(path: Path, engine: str, summary: dict[str, Any]) -> None:
    """Write ``engine.json`` with the engine's name. It is written last: a checkpoint without it is incomplete."""
    text = json.dumps({"format": FORMAT, "engine": engine, **summary}, indent=1)
    (path / _SUMMARY).write_text(text + "\n", encoding="utf-8")


def read_summary(path: Path, engine: str) -> dict[str, Any]:
    """Return the summary that :func:`write_summary` wrote for that engine.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete, or belongs to another engine or format.
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
        raise CheckpointError(f"{file} was not written by the {engine} engine")
    if summary.get("format") != FORMAT:
        raise CheckpointError(f"{file} has format {summary.get('format')}; this version reads format {FORMAT}")
    if not (path / SHARDS / ".metadata").is_file():
        raise CheckpointError(f"checkpoint {path} is incomplete: it lacks {SHARDS}/.metadata")
    require_values(path, summary, _VALUES)
    return summary


def require_values(path: Path, summary: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    """Check that a summary has the values that an engine reads.

    Raises:
        CheckpointError: a value is missing or has another type; the message names it.
    """
    for key, kind in kinds.items():
        if type(summary.get(key)) is not kind:
            problem = f"it has {summary[key]!r:.60}" if key in summary else "it is missing"
            raise CheckpointError(f"{path / _SUMMARY}: {key} has to be a {kind.__name__}; {problem}")
    if summary.get("world_size", 1) < 1:
        raise CheckpointError(f"{path / _SUMMARY}: world_size is {summary['world_size']}")


def require_fit(
    path: Path, summary: dict[str, Any], ours: dict[str, Any], has_optimizer: bool, others: Sequence[str] = ()
) -> None:
    """Check that a checkpoint belongs to the engine's model.

    Args:
        path: folder of the checkpoint, for the message.
        summary: summary from :func:`read_summary`.
        ours: ``model_type`` and ``parameters`` (name → ``[shape, dtype]``) of the engine that loads the checkpoint.
        has_optimizer: True if that engine trains.
        others: differences that the engine itself has found.

    Raises:
        CheckpointError: it does not fit; the message names the first differences.
    """
    differences: list[str] = []
    if summary["model_type"] != ours["model_type"]:
        differences.append(f"it holds a {summary['model_type']}, the engine a {ours['model_type']}")
    differences += others
    theirs, mine = summary["parameters"], ours["parameters"]
    differences += [
        f"{name}: {_describe(theirs.get(name))} in the checkpoint, {_describe(mine.get(name))} here"
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
    """Return the cause of a failure without the tracebacks that torch puts into its message."""
    if not isinstance(error, CheckpointException):
        return str(error)
    return "; ".join(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values())


def _checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
    return checksum
