"""Checkpoints: sharded tensors by megatron-core's dist_checkpointing, numbers in JSON, RNG a file a rank.

The folder::

    engine.json          what this is: engine, model type, parameters, mesh, schedule; written last
    sums/rank_<r>.json   sizes and checksums of the shards that rank r wrote
    rng/rank_<r>.pt      random state of rank r (tensors and numbers only)
    shards/              megatron-core's torch_dist format; a layer is a key of its own, and so is each entry
                         of the optimizer's state, in the shape of its parameter: any mesh can read them
"""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
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
from rollcast_engine.process_group import agree
from rollcast_engine.rng import capture_rng, derive_rng, restore_rng

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast.contracts.engine import ModelType
    from rollcast_megatron.layout import Mesh
    from rollcast_megatron.module import DecoderModel
    from rollcast_megatron.optimizer import StageOptimizer
    from rollcast_megatron.weights import Shapes

__all__ = ["ENGINE", "EngineState", "load", "save"]

log = logging.getLogger(__name__)

#: Name of the engine in ``engine.json``.
ENGINE = "megatron"
#: Each layer has keys of its own, so that stages can be cut anywhere.
_METADATA = {"non_homogeneous_layers": True}
_READ_ERRORS = (CheckpointException, OSError, ValueError, KeyError, RuntimeError, EOFError, pickle.UnpicklingError)


@dataclass(frozen=True)
class EngineState:
    """What is saved of an engine; loading writes into the same tensors.

    Attributes:
        model_type, rank, schedule_step: as in the engine.
        mesh: over which the model is spread.
        model: this rank's stage.
        optimizer: of the stage, or None.
        shapes: of the whole model's parameters, by their Hugging Face names.
        dtype: of the weights.
    """

    model_type: ModelType
    rank: int
    mesh: Mesh
    model: DecoderModel
    optimizer: StageOptimizer | None
    shapes: Shapes
    dtype: torch.dtype
    schedule_step: int

    def mesh_sizes(self) -> dict[str, int]:
        """The mesh, as JSON knows it."""
        return {"tensor": self.mesh.tensor_size, "pipeline": self.mesh.pipeline_size, "data": self.mesh.data_size}

    def parameters(self) -> dict[str, list[Any]]:
        """Shape and dtype of each parameter, as JSON knows them."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {name: [list(shape), dtype] for name, shape in self.shapes.items()}


def save(path: Path, state: EngineState) -> None:
    """Write the folder; every rank calls this.

    Raises:
        CheckpointError: on every rank, if any rank could not write its part.
    """
    from megatron.core import dist_checkpointing

    from rollcast_megatron.writer import ShardWriter

    try:
        make_folder(path, state.rank, _capture_rng())
        (path / SHARDS).mkdir(exist_ok=True)
        problem = ""
    except (OSError, RuntimeError) as error:  # torch's own writer raises RuntimeError on a full disk
        problem = f"rank {state.rank}: {error}"
    agree(problem, f"checkpoint {path} could not be written", state.mesh.world_size)
    try:
        tensors = _sharded(state, state.optimizer)
        with _quiet():
            dist_checkpointing.save(tensors, str(path / SHARDS), sharded_strategy=ShardWriter())
        write_sums(path, state.rank)
        problem = ""
    except (CheckpointException, OSError, RuntimeError) as error:
        problem = f"rank {state.rank}: {describe_failure(error)}"
    agree(problem, f"checkpoint {path} could not be written", state.mesh.world_size)
    try:
        if state.rank == 0:
            write_summary(path, ENGINE, _summary(state))
        problem = ""
    except OSError as error:
        problem = f"rank 0: {error}"
    agree(problem, f"checkpoint {path} could not be written", state.mesh.world_size)


def load(path: Path, state: EngineState) -> int:
    """Read the folder into the engine's tensors and this process's RNG; gives the schedule's step.

    Nothing is changed unless the folder is complete, fits, and is as it was written.

    Raises:
        CheckpointError: names the folder and what is missing or different.
    """
    summary = read_summary(path, ENGINE)
    require_values(path, summary, {"mesh": dict, "optimizer_steps": int})
    ours = {"model_type": state.model_type, "parameters": state.parameters()}
    require_fit(path, summary, ours, state.optimizer is not None)
    same_mesh = summary["mesh"] == state.mesh_sizes()
    rng, problem = None, ""
    try:
        rng = read_rng(rng_file(path, state.rank if same_mesh else 0))
        check_shards(path, summary["world_size"], state.rank, state.mesh.world_size)
    except CheckpointError as error:
        problem = str(error)
    agree(problem, f"checkpoint {path} cannot be used", state.mesh.world_size)
    tensors = _read(path, state, state.optimizer if summary["has_optimizer"] else None)
    with torch.no_grad():
        for name, parameter in state.model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
            if state.optimizer is not None:
                moments = {key: tensors[f"optimizer.{key}.{name}"] for key in state.optimizer.state_names}
                state.optimizer.restore(parameter, moments)
    if state.optimizer is not None:
        state.optimizer.set_steps_taken(summary["optimizer_steps"])
    if rng is not None:
        restore_saved_rng(path, rng, _restore_rng)
    if not same_mesh:
        log.warning(
            "checkpoint %s was written on the mesh %s and is read on %s: random numbers are seeded anew from rank 0's",
            path,
            summary["mesh"],
            state.mesh_sizes(),
        )
        derive_rng(state.mesh.data_rank)
    return int(summary["schedule_step"])


def _sharded(state: EngineState, optimizer: StageOptimizer | None) -> dict[str, Any]:
    """This rank's tensors, each with its place in the whole model."""
    model = state.model.sharded_state_dict(metadata=dict(_METADATA))
    tensors = {f"model.{name}": entry for name, entry in model.items() if entry.data is not None}
    if optimizer is None:
        return tensors
    for name, parameter in state.model.named_parameters():
        collected = optimizer.collect(parameter)
        if collected is not None and state.mesh.data_rank == 0:
            tensors |= _beside(model[name], name, collected)
    return tensors


def _read(path: Path, state: EngineState, optimizer: StageOptimizer | None) -> dict[str, Tensor]:
    """The tensors that this rank needs, in host memory."""
    from megatron.core import dist_checkpointing

    model = state.model.sharded_state_dict(metadata=dict(_METADATA))
    wanted: dict[str, Any] = {}
    for name, parameter in state.model.named_parameters():
        wanted[f"model.{name}"] = replace(model[name], data=torch.zeros(parameter.shape, dtype=parameter.dtype))
        for key in optimizer.state_names if optimizer is not None else ():
            wanted |= _beside(model[name], name, {key: torch.zeros(parameter.shape, dtype=torch.float32)})
    try:
        with _quiet():
            found: dict[str, Tensor] = dist_checkpointing.load(wanted, str(path / SHARDS))
    except _READ_ERRORS as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {describe_failure(error)}") from error
    except Exception as error:
        from megatron.core.dist_checkpointing.core import CheckpointingException

        if isinstance(error, CheckpointingException):
            raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error
        raise
    return found


def _beside(entry: Any, name: str, state: dict[str, Tensor]) -> dict[str, Any]:
    """Entries of the optimizer's state, placed as their parameter is."""
    from megatron.core.dist_checkpointing import ShardedTensor

    placed = {}
    for key, tensor in state.items():
        options: dict[str, Any] = {"key": f"optimizer.{key}.{entry.key}", "data": tensor}
        if isinstance(entry, ShardedTensor):
            options["dtype"] = tensor.dtype
        placed[f"optimizer.{key}.{name}"] = replace(entry, **options)
    return placed


def _summary(state: EngineState) -> dict[str, Any]:
    return {
        "model_type": state.model_type,
        "world_size": state.mesh.world_size,
        "mesh": state.mesh_sizes(),
        "schedule_step": state.schedule_step,
        "has_optimizer": state.optimizer is not None,
        "optimizer_steps": state.optimizer.steps_taken() if state.optimizer is not None else 0,
        "parameters": state.parameters(),
    }


def _capture_rng() -> dict[str, Any]:
    """The process's random state, and that of the layers."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    layers = {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()}
    return {"process": capture_rng(), "layers": layers}


def _restore_rng(state: dict[str, Any]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    restore_rng(state["process"])
    get_cuda_rng_tracker().set_states(state["layers"])


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remarks about its own use of deprecated parts."""
    with warnings.catch_warnings():
        for message in (".*TypedStorage is deprecated.*", ".*single process.*", ".*is deprecated.*"):
            warnings.filterwarnings("ignore", message=message)
        yield
