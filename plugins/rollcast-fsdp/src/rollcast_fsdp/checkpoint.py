"""Checkpoints: sharded tensors by torch.distributed.checkpoint, metadata in JSON, one RNG file per rank.

The folder::

    engine.json          summary: engine, model type, parameters, schedule; written last
    rng/rank_<r>.pt      random state of rank r (tensors and numbers only)
    shards/              torch.distributed.checkpoint: model.<name>, optim.<name>.<entry>
    sums/rank_<r>.json   sizes and checksums of the shards that rank r wrote, computed while writing

With an adapter only the trained tensors are saved. A checkpoint may be loaded on another number of ranks.
"""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from rollcast.errors import CheckpointError
from rollcast_engine.checkpoint_files import (
    SHARDS,
    check_shards,
    describe_failure,
    make_folder,
    read_rng,
    read_summary,
    require_fit,
    require_values,
    restore_saved_rng,
    rng_file,
    write_summary,
    write_sums,
)
from rollcast_engine.optim import prime_optimizer
from rollcast_engine.pending_save import PendingSave
from rollcast_engine.process_group import agree
from rollcast_engine.rng import derive_rng, restore_rng
from rollcast_engine.shard_files import CheckedReader, SummingWriter

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast.contracts.engine import ModelType
    from rollcast_engine.lora import Adapter

__all__ = ["EngineState", "load", "read_tensors", "save", "start_save"]

log = logging.getLogger(__name__)

_READ_ERRORS = (CheckpointException, OSError, ValueError, KeyError, RuntimeError, EOFError, pickle.UnpicklingError)
_WRITE_ERRORS = (CheckpointException, OSError, RuntimeError)  # RuntimeError: torch's own writer on a full disk


@dataclass(frozen=True)
class EngineState:
    """State of an engine to save; loading writes into the same tensors.

    Attributes:
        model_type, rank, world_size, schedule_step: as in the engine.
        distributed: True if the tensors are sharded over the ranks' process group.
        tensors: parameters and buffers by name, each once; with an adapter only the trained ones.
        optimizer: the optimizer; None for an engine that does not train.
        adapter: adapter inside the model; None without one.
    """

    model_type: ModelType
    rank: int
    world_size: int
    distributed: bool
    tensors: dict[str, Tensor]
    optimizer: torch.optim.Optimizer | None
    schedule_step: int
    adapter: Adapter | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return nested dicts with the engine's own tensors only."""
        state: dict[str, Any] = {"model": {name: tensor.detach() for name, tensor in self.tensors.items()}}
        moments = self.moments()
        return {**state, "optim": moments} if moments else state

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer's state by parameter; empty before it has state."""
        states = {} if self.optimizer is None else self.optimizer.state
        optimizer_states = {
            name: {key: value for key, value in states[tensor].items() if isinstance(value, torch.Tensor)}
            for name, tensor in self.tensors.items()
            if tensor in states
        }
        return {name: moments for name, moments in optimizer_states.items() if moments}

    def entries(self) -> list[str]:
        """Return the names of the tensors that the optimizer keeps for a parameter."""
        return sorted({key for moments in self.moments().values() for key in moments})

    def parameters(self) -> dict[str, list[Any]]:
        """Return shape and dtype of each tensor, as JSON values."""
        return {name: [list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in self.tensors.items()}

    def summary(self) -> dict[str, Any]:
        """Return the content of ``engine.json``."""
        adapter = None
        if self.adapter is not None:
            pairs = {name: [pair.a, pair.b, pair.scaling] for name, pair in self.adapter.pairs.items()}
            adapter = {"config": self.adapter.config, "base": self.adapter.base_fingerprint, "pairs": pairs}
        return {
            "model_type": self.model_type,
            "world_size": self.world_size,
            "schedule_step": self.schedule_step,
            "has_optimizer": self.optimizer is not None,
            "optimizer_state": self.entries(),
            "parameters": self.parameters(),
            "adapter": adapter,
        }


def save(path: Path, state: EngineState) -> None:
    """Write the folder; every rank must call.

    Raises:
        CheckpointError: a rank could not write its part; every rank raises.
    """
    _begin(path, state)
    problem = ""
    try:
        writer = SummingWriter(path / SHARDS)
        with _quiet():
            dcp.save(  # type: ignore[attr-defined]
                state.state_dict(), storage_writer=writer, no_dist=not state.distributed
            )
        write_sums(path, state.rank, writer.sums)
    except _WRITE_ERRORS as error:
        problem = f"rank {state.rank}: {describe_failure(error)}"
    agree(problem, f"checkpoint {path} could not be written", state.world_size)
    if state.rank == 0:
        try:
            write_summary(path, "fsdp", state.summary())
        except OSError as error:
            problem = f"rank 0: {error}"
    agree(problem, f"checkpoint {path} could not be written", state.world_size)


def start_save(path: Path, state: EngineState, group: dist.ProcessGroup | None) -> PendingSave:
    """Copy the state to host memory, and write the folder from there in a thread; every rank must call.

    Args:
        path: folder of the checkpoint.
        state: state to save; it may change again once this returns.
        group: process group of all ranks on CPU, not used by anything else meanwhile; None for a single rank.

    Raises:
        CheckpointError: a rank could not start writing; every rank raises.
    """
    _begin(path, state)
    summary, rank, no_dist = state.summary(), state.rank, not state.distributed
    writer = SummingWriter(path / SHARDS)
    with _quiet():
        shards: Any = dcp.async_save(  # type: ignore[attr-defined]
            state.state_dict(), storage_writer=writer, process_group=group, no_dist=no_dist
        )

    def finish() -> None:
        problem = ""
        try:
            shards.result()
            write_sums(path, rank, writer.sums)
        except _WRITE_ERRORS as error:
            problem = f"rank {rank}: {describe_failure(error)}"
        agree(problem, f"checkpoint {path} could not be written", state.world_size, group)
        if rank == 0:
            write_summary(path, "fsdp", summary)

    return PendingSave(path, finish)


def _begin(path: Path, state: EngineState) -> None:
    try:
        make_folder(path, state.rank)
        problem = ""
    except _WRITE_ERRORS as error:
        problem = f"rank {state.rank}: {error}"
    agree(problem, f"checkpoint {path} could not be written", state.world_size)


def load(path: Path, state: EngineState) -> int:
    """Load the folder into the engine's tensors and this process's RNG, and return the step of the schedule.

    Nothing is changed unless the folder is complete, intact, and fits the engine.

    Raises:
        CheckpointError: it is not; every rank raises, and the message names what is missing, different or corrupt.
    """
    rng: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    problem = ""
    try:
        summary = read_summary(path, "fsdp")
        require_values(path, summary, {"optimizer_state": list})
        _compare(path, summary, state)
        rng = _find_rng(path, summary, state)
        check_shards(path, int(summary["world_size"]), state.rank, state.world_size)
    except CheckpointError as error:
        problem = str(error)
    agree(problem, "", state.world_size)
    if state.optimizer is not None and summary["optimizer_state"]:
        prime_optimizer(state.optimizer)
        if state.entries() != summary["optimizer_state"]:
            raise CheckpointError(
                f"checkpoint {path} has another optimizer: it has {', '.join(summary['optimizer_state'])} for each "
                f"parameter, but optim.optimizer needs {', '.join(state.entries()) or 'nothing'}"
            )
    try:
        with _quiet():
            dcp.load(  # type: ignore[attr-defined]
                state.state_dict(), storage_reader=CheckedReader(path / SHARDS), no_dist=not state.distributed
            )
    except _READ_ERRORS as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {describe_failure(error)}") from error
    restore_saved_rng(path, rng, restore_rng)
    if summary["world_size"] != state.world_size:
        log.warning(
            "checkpoint %s was written by %d ranks and is read by %d: random numbers are re-seeded from rank 0's state",
            path,
            summary["world_size"],
            state.world_size,
        )
        derive_rng(state.rank)
    return int(summary["schedule_step"])


def _find_rng(path: Path, summary: Mapping[str, Any], state: EngineState) -> dict[str, Any]:
    same_ranks = summary["world_size"] == state.world_size
    ranks = range(state.world_size) if same_ranks else range(1)
    missing = [str(rng_file(path, rank)) for rank in ranks if not rng_file(path, rank).is_file()]
    if missing:
        raise CheckpointError(f"checkpoint {path} is incomplete: it lacks {', '.join(missing)}")
    return read_rng(rng_file(path, state.rank if same_ranks else 0))


def read_tensors(path: Path, names: Mapping[str, tuple[Any, str]]) -> dict[str, Tensor]:
    """Return some of the model's tensors, whole and in host memory, read in one process.

    Args:
        path: folder of the checkpoint.
        names: tensor names with shape and dtype, as under ``parameters`` in the checkpoint's summary.

    Raises:
        CheckpointError: they cannot be read.
    """
    tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in names.items()}
    try:
        with _quiet():
            dcp.load(  # type: ignore[attr-defined]
                {"model": tensors}, storage_reader=CheckedReader(path / SHARDS), no_dist=True
            )
    except _READ_ERRORS as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {describe_failure(error)}") from error
    return tensors


def _compare(path: Path, summary: dict[str, Any], state: EngineState) -> None:
    differences: list[str] = []
    theirs_adapter, ours_adapter = summary.get("adapter"), state.summary()["adapter"]
    if (theirs_adapter is None) != (ours_adapter is None):
        whole, part = "the whole model", "a LoRA adapter"
        there, here = (part, whole) if ours_adapter is None else (whole, part)
        differences.append(f"it contains {there}, but the engine trains {here} (model.lora_rank)")
    elif theirs_adapter is not None and _differ(theirs_adapter["base"], ours_adapter["base"]):
        differences.append("its adapter was trained on other base weights than those in model.path")
    ours = {"model_type": state.model_type, "parameters": state.parameters()}
    require_fit(path, summary, ours, state.optimizer is not None, differences)


def _differ(theirs: str | None, ours: str | None) -> bool:
    return None not in (theirs, ours) and theirs != ours


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's warnings about its own deprecated storage and about saving from a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*TypedStorage is deprecated.*")
        warnings.filterwarnings("ignore", message=".*single process.*")
        yield
