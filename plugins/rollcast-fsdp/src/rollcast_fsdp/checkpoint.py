"""Checkpoints: sharded tensors by torch.distributed.checkpoint, numbers in JSON, RNG a file a rank.

The folder::

    engine.json          what this is: engine, model type, parameters, schedule; written last
    rng/rank_<r>.pt      random state of rank r (tensors and numbers only)
    shards/              torch.distributed.checkpoint: model.<name>, optim.<name>.<entry>
"""

from __future__ import annotations

import json
import logging
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from rollcast.errors import CheckpointError
from rollcast_engine.rng import capture_rng, derive_rng, restore_rng

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast.contracts.engine import ModelType

__all__ = ["EngineState", "load", "read_weights", "save"]

log = logging.getLogger(__name__)

FORMAT = 1
_READ_ERRORS = (CheckpointException, OSError, ValueError, KeyError, RuntimeError, EOFError, pickle.UnpicklingError)


@dataclass(frozen=True)
class EngineState:
    """What is saved of an engine; loading writes into the same tensors.

    Attributes:
        model_type, rank, world_size, schedule_step: as in the engine.
        distributed: the tensors are sharded over the ranks' process group.
        tensors: parameters and buffers by name, each once.
        optimizer: with its state in place, or None.
    """

    model_type: ModelType
    rank: int
    world_size: int
    distributed: bool
    tensors: dict[str, Tensor]
    optimizer: torch.optim.Optimizer | None
    schedule_step: int

    def state_dict(self) -> dict[str, Any]:
        """Nested dicts of nothing but tensors, which are the engine's own."""
        state: dict[str, Any] = {"model": {name: tensor.detach() for name, tensor in self.tensors.items()}}
        if self.optimizer is not None:
            moments = self.optimizer.state
            state["optim"] = {name: dict(moments[t]) for name, t in self.tensors.items() if t in moments}
        return state

    def parameters(self) -> dict[str, list[Any]]:
        """Shape and dtype of each tensor, as JSON knows them."""
        return {name: [list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in self.tensors.items()}


def save(path: Path, state: EngineState) -> None:
    """Write the folder; every rank calls this.

    Raises:
        CheckpointError: on every rank, if any rank could not write its part.
    """
    try:
        (path / "rng").mkdir(parents=True, exist_ok=True)
        torch.save(capture_rng(), _rng_file(path, state.rank))
        problem = ""
    except (OSError, RuntimeError) as error:  # torch's own writer raises RuntimeError on a full disk
        problem = f"rank {state.rank}: {error}"
    _agree(problem, path, state)
    try:
        with _quiet():
            dcp.save(  # type: ignore[attr-defined]
                state.state_dict(), checkpoint_id=path / "shards", no_dist=not state.distributed
            )
        if state.rank == 0:
            summary = {
                "format": FORMAT,
                "engine": "fsdp",
                "model_type": state.model_type,
                "world_size": state.world_size,
                "schedule_step": state.schedule_step,
                "has_optimizer": state.optimizer is not None,
                "parameters": state.parameters(),
            }
            (path / "engine.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        problem = ""
    except (CheckpointException, OSError, RuntimeError) as error:
        problem = f"rank {state.rank}: {_reason(error)}"
    _agree(problem, path, state)


def load(path: Path, state: EngineState) -> int:
    """Read the folder into the engine's tensors and this process's RNG; gives the schedule's step.

    Nothing is changed unless the folder is complete and fits.

    Raises:
        CheckpointError: names the folder and what is missing or different.
    """
    summary = _summary(path)
    _compare(path, summary, state)
    same_ranks = summary["world_size"] == state.world_size
    ranks = range(state.world_size) if same_ranks else range(1)
    missing = [str(_rng_file(path, rank)) for rank in ranks if not _rng_file(path, rank).is_file()]
    if missing:
        raise CheckpointError(f"checkpoint {path} is incomplete: it lacks {', '.join(missing)}")
    rng = _read_rng(_rng_file(path, state.rank if same_ranks else 0))
    try:
        with _quiet():
            dcp.load(  # type: ignore[attr-defined]
                state.state_dict(), checkpoint_id=path / "shards", no_dist=not state.distributed
            )
    except _READ_ERRORS as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {_reason(error)}") from error
    restore_rng(rng)
    if not same_ranks:
        log.warning(
            "checkpoint %s was written by %d ranks and is read by %d: random numbers are seeded anew from rank 0's",
            path,
            summary["world_size"],
            state.world_size,
        )
        derive_rng(state.rank)
    return int(summary["schedule_step"])


def read_weights(path: Path) -> tuple[ModelType, dict[str, Tensor]]:
    """The model's tensors, whole and in host memory, read in one process.

    Raises:
        CheckpointError: the folder is incomplete or of another engine.
    """
    summary = _summary(path)
    tensors = {
        name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in summary["parameters"].items()
    }
    try:
        with _quiet():
            dcp.load(  # type: ignore[attr-defined]
                {"model": tensors}, checkpoint_id=path / "shards", no_dist=True
            )
    except _READ_ERRORS as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {_reason(error)}") from error
    return summary["model_type"], tensors


def _reason(error: BaseException) -> str:
    """What went wrong, without the tracebacks that torch puts into its message."""
    if not isinstance(error, CheckpointException):
        return str(error)
    return "; ".join(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values())


def _rng_file(path: Path, rank: int) -> Path:
    return path / "rng" / f"rank_{rank}.pt"


def _read_rng(file: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(file, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    return state


def _summary(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint folder {path}")
    file = path / "engine.json"
    if not file.is_file():
        raise CheckpointError(f"checkpoint {path} is incomplete: it lacks engine.json, which is written last")
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(summary, dict) or summary.get("engine") != "fsdp":
        raise CheckpointError(f"{file} is not of the fsdp engine")
    if summary.get("format") != FORMAT:
        raise CheckpointError(f"{file} has format {summary.get('format')}; this version reads format {FORMAT}")
    if not (path / "shards" / ".metadata").is_file():
        raise CheckpointError(f"checkpoint {path} is incomplete: it lacks shards/.metadata")
    return summary


def _compare(path: Path, summary: dict[str, Any], state: EngineState) -> None:
    differences: list[str] = []
    if summary["model_type"] != state.model_type:
        differences.append(f"it holds a {summary['model_type']}, the engine a {state.model_type}")
    theirs, ours = summary["parameters"], state.parameters()
    differences += [
        f"{name}: {_describe(theirs.get(name))} there, {_describe(ours.get(name))} here"
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    ]
    if state.optimizer is not None and not summary["has_optimizer"]:
        differences.append("it has no optimizer state")
    if differences:
        shown = "; ".join(differences[:3])
        more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise CheckpointError(f"checkpoint {path} does not fit this engine: {shown}{more}")


def _describe(parameter: list[Any] | None) -> str:
    return "absent" if parameter is None else f"{parameter[1]}{parameter[0]}"


def _agree(problem: str, path: Path, state: EngineState) -> None:
    """Fail on every rank if one did, and on none before all have come this far."""
    problems: list[Any] = [problem]
    if state.distributed:
        problems = [None] * state.world_size
        dist.all_gather_object(problems, problem)
    first = next((found for found in problems if found), None)
    if first:
        raise CheckpointError(f"checkpoint {path} could not be written: {first}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remarks about its own use of deprecated storage, and about one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*TypedStorage is deprecated.*")
        warnings.filterwarnings("ignore", message=".*single process.*")
        yield
