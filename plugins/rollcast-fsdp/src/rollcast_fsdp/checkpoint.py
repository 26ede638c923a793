"""Checkpoints: sharded tensors by torch.distributed.checkpoint, numbers in JSON, RNG a file a rank.

The folder::

    engine.json          what this is: engine, model type, parameters, schedule; written last
    rng/rank_<r>.pt      random state of rank r (tensors and numbers only)
    shards/              torch.distributed.checkpoint: model.<name>, optim.<name>.<entry>
    sums/rank_<r>.json   sizes and checksums of the shards that rank r wrote

Of a model with an adapter the tensors are those that train. The number of ranks that load may be another.
"""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
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
from rollcast_engine.metadata import check_metadata
from rollcast_engine.optim import prime_optimizer
from rollcast_engine.process_group import agree
from rollcast_engine.rng import derive_rng, restore_rng

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast.contracts.engine import ModelType
    from rollcast_fsdp.lora import Adapter

__all__ = ["EngineState", "PendingSave", "load", "read_tensors", "save", "start_save"]

log = logging.getLogger(__name__)

_READ_ERRORS = (CheckpointException, OSError, ValueError, KeyError, RuntimeError, EOFError, pickle.UnpicklingError)
_WRITE_ERRORS = (CheckpointException, OSError, RuntimeError)  # RuntimeError: torch's own writer on a full disk


@dataclass(frozen=True)
class EngineState:
    """What is saved of an engine; loading writes into the same tensors.

    Attributes:
        model_type, rank, world_size, schedule_step: as in the engine.
        distributed: the tensors are sharded over the ranks' process group.
        tensors: parameters and buffers by name, each once; with an adapter those that train.
        optimizer: None for an engine that does not train.
        adapter: that is inside the model.
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
        """Nested dicts of nothing but tensors, which are the engine's own."""
        state: dict[str, Any] = {"model": {name: tensor.detach() for name, tensor in self.tensors.items()}}
        moments = self.moments()
        return {**state, "optim": moments} if moments else state

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state by parameter; empty as long as it has none."""
        states = {} if self.optimizer is None else self.optimizer.state
        found = {
            name: {key: value for key, value in states[tensor].items() if isinstance(value, torch.Tensor)}
            for name, tensor in self.tensors.items()
            if tensor in states
        }
        return {name: moments for name, moments in found.items() if moments}

    def entries(self) -> list[str]:
        """Names of the tensors that the optimizer keeps of a parameter."""
        return sorted({key for moments in self.moments().values() for key in moments})

    def parameters(self) -> dict[str, list[Any]]:
        """Shape and dtype of each tensor, as JSON knows them."""
        return {name: [list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in self.tensors.items()}

    def summary(self) -> dict[str, Any]:
        """What ``engine.json`` says of it."""
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


class PendingSave:
    """A checkpoint that is being written."""

    def __init__(self, path: Path, written: Future[None]) -> None:
        self._path = path
        self._written = written

    def finish(self, wait: bool) -> bool:
        """Whether all of it is on the disk.

        Raises:
            CheckpointError: it could not be written.
        """
        if not wait and not self._written.done():
            return False
        try:
            self._written.result()
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"checkpoint {self._path} could not be written: {error}") from error
        return True


def save(path: Path, state: EngineState) -> None:
    """Write the folder; every rank calls this.

    Raises:
        CheckpointError: on every rank, if any rank could not write its part.
    """
    _begin(path, state)
    problem = ""
    try:
        with _quiet():
            dcp.save(  # type: ignore[attr-defined]
                state.state_dict(), checkpoint_id=path / SHARDS, no_dist=not state.distributed
            )
        write_sums(path, state.rank)
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
    """Copy the state to host memory, and write the folder from there in a thread; every rank calls this.

    Args:
        path: of the folder.
        state: may change again once this returns.
        group: of all ranks on CPU, which nothing else uses meanwhile; None for one rank.

    Raises:
        CheckpointError: on every rank, if any rank could not begin.
    """
    _begin(path, state)
    summary, rank, no_dist = state.summary(), state.rank, not state.distributed
    with _quiet():
        shards: Any = dcp.async_save(  # type: ignore[attr-defined]
            state.state_dict(), checkpoint_id=path / SHARDS, process_group=group, no_dist=no_dist
        )

    def finish() -> None:
        problem = ""
        try:
            shards.result()
            write_sums(path, rank)
        except _WRITE_ERRORS as error:
            problem = f"rank {rank}: {describe_failure(error)}"
        agree(problem, f"checkpoint {path} could not be written", state.world_size, group)
        if rank == 0:
            write_summary(path, "fsdp", summary)

    executor = ThreadPoolExecutor(1, "checkpoint")
    written = executor.submit(finish)
    executor.shutdown(wait=False)
    return PendingSave(path, written)


def _begin(path: Path, state: EngineState) -> None:
    try:
        make_folder(path, state.rank)
        problem = ""
    except _WRITE_ERRORS as error:
        problem = f"rank {state.rank}: {error}"
    agree(problem, f"checkpoint {path} could not be written", state.world_size)


def load(path: Path, state: EngineState) -> int:
    """Read the folder into the engine's tensors and this process's RNG; gives the schedule's step.

    Nothing is changed unless the folder is complete, as it was written, and fits.

    Raises:
        CheckpointError: on every rank; names the folder and what is missing, different or corrupt.
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
                f"checkpoint {path} is of another optimizer: it has {', '.join(summary['optimizer_state'])} of each "
                f"parameter, and optim.optimizer here {', '.join(state.entries()) or 'nothing'}"
            )
    try:
        with _quiet():
            dcp.load(  # type: ignore[attr-defined]
                state.state_dict(), checkpoint_id=path / SHARDS, no_dist=not state.distributed
            )
    except _READ_ERRORS as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {describe_failure(error)}") from error
    restore_saved_rng(path, rng, restore_rng)
    if summary["world_size"] != state.world_size:
        log.warning(
            "checkpoint %s was written by %d ranks and is read by %d: random numbers are seeded anew from rank 0's",
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
    """Some of the model's tensors, whole and in host memory, read in one process.

    Args:
        path: of the checkpoint.
        names: with shape and dtype, as its summary has them under ``parameters``.

    Raises:
        CheckpointError: they cannot be read.
    """
    check_metadata(path / SHARDS / ".metadata")
    tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in names.items()}
    try:
        with _quiet():
            dcp.load(  # type: ignore[attr-defined]
                {"model": tensors}, checkpoint_id=path / SHARDS, no_dist=True
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
        differences.append(f"it holds {there}, the engine trains {here} (model.lora_rank)")
    elif theirs_adapter is not None and _differ(theirs_adapter["base"], ours_adapter["base"]):
        differences.append("its adapter was trained beside other weights than those in model.path")
    ours = {"model_type": state.model_type, "parameters": state.parameters()}
    require_fit(path, summary, ours, state.optimizer is not None, differences)


def _differ(theirs: str | None, ours: str | None) -> bool:
    return None not in (theirs, ours) and theirs != ours


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remarks about its own use of deprecated storage, and about one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*TypedStorage is deprecated.*")
        warnings.filterwarnings("ignore", message=".*single process.*")
        yield
