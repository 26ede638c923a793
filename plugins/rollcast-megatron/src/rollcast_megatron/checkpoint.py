"""Checkpoints: sharded tensors by megatron-core's dist_checkpointing, metadata in JSON, one RNG file per rank.

The folder::

    engine.json          summary: engine, model type, parameters, mesh, schedule; written last
    sums/rank_<r>.json   sizes and checksums of the shards that rank r wrote
    rng/rank_<r>.pt      random state of rank r (tensors and numbers only)
    shards/              megatron-core's torch_dist format; each layer has its own key, and so has each entry
                         of the optimizer's state, in the shape of its parameter: any mesh can read them
"""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
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
from rollcast_engine.pending_save import PendingSave
from rollcast_engine.process_group import agree
from rollcast_engine.rng import capture_rng, derive_rng, restore_rng
from rollcast_megatron.weights import VALUE_HEAD

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast.contracts.engine import ModelType
    from rollcast_megatron.layout import Mesh
    from rollcast_megatron.lora import AdapterPlan
    from rollcast_megatron.module import Stage
    from rollcast_megatron.optimizer import StageOptimizer
    from rollcast_megatron.weights import Shapes
    from rollcast_megatron.writer import ShardWriter

__all__ = ["ENGINE", "EngineState", "load", "save", "start_save"]

log = logging.getLogger(__name__)

#: Name of the engine in ``engine.json``.
ENGINE = "megatron"
#: Each layer has its own keys, so that another mesh can split the stages anywhere.
_METADATA = {"non_homogeneous_layers": True}
_WRITE_ERRORS = (CheckpointException, OSError, RuntimeError)  # RuntimeError: torch's own writer on a full disk
_READ_ERRORS = (CheckpointException, OSError, ValueError, KeyError, RuntimeError, EOFError, pickle.UnpicklingError)


@dataclass(frozen=True)
class EngineState:
    """State of an engine to save; loading writes into the same tensors.

    Attributes:
        model_type, rank, schedule_step: as in the engine.
        mesh: mesh that the model is distributed over.
        model: this rank's stage.
        optimizer: optimizer of the stage; None for an engine that does not train.
        shapes: shapes of the whole model's parameters by Hugging Face name.
        dtype: dtype of the weights.
        adapter: adapter that is trained instead of the model; only trained tensors are saved. None without one.
    """

    model_type: ModelType
    rank: int
    mesh: Mesh
    model: Stage
    optimizer: StageOptimizer | None
    shapes: Shapes
    dtype: torch.dtype
    schedule_step: int
    adapter: AdapterPlan | None = None

    def tensors(self) -> dict[str, Any]:
        """Return the tensors of this rank that a checkpoint holds, by megatron-core's names."""
        return {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if self.adapter is None or parameter.requires_grad
        }

    def mesh_sizes(self) -> dict[str, int]:
        """Return the sizes of the mesh, as JSON values."""
        mesh = self.mesh
        return {
            "tensor": mesh.tensor_size,
            "context": mesh.context_size,
            "pipeline": mesh.pipeline_size,
            "expert": mesh.expert_size,
            "data": mesh.data_size,
        }

    def parameters(self) -> dict[str, list[Any]]:
        """Return shape and dtype of each parameter, as JSON values."""
        dtype = str(self.dtype).removeprefix("torch.")
        if self.adapter is None:
            return {name: [list(shape), dtype] for name, shape in self.shapes.items()}
        heads = {name: shape for name, shape in self.shapes.items() if name in VALUE_HEAD}
        layout = {name: [list(shape), dtype] for name, shape in heads.items()}
        return layout | {name: [list(shape), "float32"] for name, shape in self.adapter.shapes.items()}

    def described_adapter(self) -> dict[str, Any] | None:
        """Return PEFT's config of the adapter and the base model that belongs to it, as JSON values."""
        if self.adapter is None:
            return None
        adapter, dtype = self.adapter.adapter, str(self.dtype).removeprefix("torch.")
        return {"config": adapter.config, "base": adapter.base_fingerprint, "dtype": dtype}


def save(path: Path, state: EngineState) -> None:
    """Write the folder; every rank must call.

    Raises:
        CheckpointError: a rank could not write its part; every rank raises.
    """
    _begin(path, state)
    writer = _prepare(path, state, _sharded(state, state.optimizer))
    _write(path, state.rank, state.mesh.world_size, writer, _summary(state), None)


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
    writer = _prepare(path, state, _copied(_sharded(state, state.optimizer)))
    summary, rank, ranks = _summary(state), state.rank, state.mesh.world_size
    return PendingSave(path, lambda: _write(path, rank, ranks, writer, summary, group))


def _begin(path: Path, state: EngineState) -> None:
    try:
        make_folder(path, state.rank, _capture_rng())
        (path / SHARDS).mkdir(exist_ok=True)
        problem = ""
    except _WRITE_ERRORS as error:
        problem = f"rank {state.rank}: {error}"
    agree(problem, f"checkpoint {path} could not be written", state.mesh.world_size)


def _prepare(path: Path, state: EngineState, tensors: dict[str, Any]) -> ShardWriter:
    """Return a writer of the tensors, once megatron-core has written all but the shards."""
    from megatron.core import dist_checkpointing

    from rollcast_megatron.writer import ShardWriter

    writer = ShardWriter(path / SHARDS)
    problem = ""
    try:
        with _quiet():
            dist_checkpointing.save(tensors, str(path / SHARDS), sharded_strategy=writer)
    except _WRITE_ERRORS as error:
        problem = f"rank {state.rank}: {describe_failure(error)}"
    agree(problem, f"checkpoint {path} could not be written", state.mesh.world_size)
    return writer


def _write(
    path: Path,
    rank: int,
    ranks: int,
    writer: ShardWriter,
    summary: dict[str, Any],
    group: dist.ProcessGroup | None,
) -> None:
    problem = ""
    try:
        with _quiet():
            writer.write(group)
        write_sums(path, rank, writer.sums)
    except _WRITE_ERRORS as error:
        problem = f"rank {rank}: {describe_failure(error)}"
    agree(problem, f"checkpoint {path} could not be written", ranks, group)
    if rank == 0:
        try:
            write_summary(path, ENGINE, summary)
        except OSError as error:
            problem = f"rank 0: {error}"
    agree(problem, f"checkpoint {path} could not be written", ranks, group)


def _copied(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries with copies of their tensors in host memory."""
    return {
        name: replace(entry, data=entry.data.detach().to("cpu", copy=True))
        if isinstance(entry.data, torch.Tensor)
        else entry
        for name, entry in tensors.items()
    }


def load(path: Path, state: EngineState) -> int:
    """Load the folder into the engine's tensors and this process's RNG, and return the step of the schedule.

    Nothing is changed unless the folder is complete, intact, and fits the engine.

    Raises:
        CheckpointError: it is not; the message names the folder and what is missing or different.
    """
    summary = read_summary(path, ENGINE)
    require_values(path, summary, {"mesh": dict, "optimizer_steps": int})
    ours = {"model_type": state.model_type, "parameters": state.parameters()}
    require_fit(path, summary, ours, state.optimizer is not None, _adapter_differences(summary, state))
    same_mesh = summary["mesh"] == state.mesh_sizes()
    rng, problem = None, ""
    try:
        rng = read_rng(rng_file(path, state.rank if same_mesh else 0))
        check_shards(path, summary["world_size"], state.rank, state.mesh.world_size)
        _check_common(path / SHARDS / "common.pt")
    except CheckpointError as error:
        problem = str(error)
    agree(problem, f"checkpoint {path} cannot be used", state.mesh.world_size)
    tensors = _read(path, state, state.optimizer if summary["has_optimizer"] else None)
    with torch.no_grad():
        for name, parameter in state.tensors().items():
            parameter.copy_(tensors[f"model.{name}"])
            if state.optimizer is not None and parameter.requires_grad:
                moments = {key: tensors[f"optimizer.{key}.{name}"] for key in state.optimizer.state_names}
                state.optimizer.restore(parameter, moments)
    if state.optimizer is not None:
        state.optimizer.set_steps_taken(summary["optimizer_steps"])
    if rng is not None:
        restore_saved_rng(path, rng, _restore_rng)
    if not same_mesh:
        log.warning(
            "checkpoint %s was written on the mesh %s and is read on %s: random numbers are re-seeded from rank 0",
            path,
            summary["mesh"],
            state.mesh_sizes(),
        )
        derive_rng(state.mesh.data_rank * state.mesh.context_size + state.mesh.context_rank)
    return int(summary["schedule_step"])


def _check_common(file: Path) -> None:
    """Check that a file that megatron-core will unpickle holds only tensors and plain values.

    torch's restricted loader is megatron-core's default too, but an environment variable
    (``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD``) turns it off there.

    Raises:
        CheckpointError: the file is missing or damaged, or names code.
    """
    try:
        torch.load(file, map_location="cpu", weights_only=True)
    except _READ_ERRORS as error:
        raise CheckpointError(f"{file} is not a file of plain values: {describe_failure(error)}") from error


def _sharded(state: EngineState, optimizer: StageOptimizer | None) -> dict[str, Any]:
    """Return this rank's tensors, each with its position in the whole model."""
    model = state.model.sharded_state_dict(_METADATA)
    tensors = {f"model.{name}": entry for name, entry in model.items() if entry.data is not None}
    if state.adapter is not None:
        tensors = {f"model.{name}": model[name] for name in state.tensors()}
    if optimizer is None:
        return tensors
    for name, parameter in state.tensors().items():
        if not parameter.requires_grad:
            continue
        collected = optimizer.collect(parameter)
        is_expert = not getattr(parameter, "allreduce", True)
        is_first = state.mesh.data_rank == 0 and state.mesh.context_rank == 0
        if collected is not None and (state.mesh.expert_data_rank == 0 if is_expert else is_first):
            tensors |= _beside(model[name], name, collected)
    return tensors


def _read(path: Path, state: EngineState, optimizer: StageOptimizer | None) -> dict[str, Tensor]:
    """Return the tensors that this rank needs, in host memory."""
    from megatron.core import dist_checkpointing

    model = state.model.sharded_state_dict(_METADATA)
    wanted: dict[str, Any] = {}
    for name, parameter in state.tensors().items():
        wanted[f"model.{name}"] = replace(model[name], data=torch.zeros(parameter.shape, dtype=parameter.dtype))
        for key in optimizer.state_names if optimizer is not None and parameter.requires_grad else ():
            wanted |= _beside(model[name], name, {key: torch.zeros(parameter.shape, dtype=torch.float32)})
    try:
        with _quiet():
            loaded: dict[str, Tensor] = dist_checkpointing.load(wanted, str(path / SHARDS))
    except _READ_ERRORS as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {describe_failure(error)}") from error
    except Exception as error:
        from megatron.core.dist_checkpointing.core import CheckpointingException

        if isinstance(error, CheckpointingException):
            raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error
        raise
    return loaded


def _beside(entry: Any, name: str, state: dict[str, Tensor]) -> dict[str, Any]:
    """Return entries of the optimizer's state, sharded like their parameter."""
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
        "adapter": state.described_adapter(),
    }


def _adapter_differences(summary: dict[str, Any], state: EngineState) -> list[str]:
    theirs, ours = summary.get("adapter"), state.described_adapter()
    if (theirs is None) != (ours is None):
        whole, part = "the whole model", "a LoRA adapter"
        there, here = (part, whole) if ours is None else (whole, part)
        return [f"it contains {there}, but the engine trains {here} (model.lora_rank)"]
    bases = {adapter["base"] for adapter in (theirs, ours) if adapter is not None} - {None}
    return ["its adapter was trained on other base weights than those in model.path"] if len(bases) > 1 else []


def _capture_rng() -> dict[str, Any]:
    """Return the random state of the process and of the layers."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    layers = {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()}
    return {"process": capture_rng(), "layers": layers}


def _restore_rng(state: dict[str, Any]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    restore_rng(state["process"])
    get_cuda_rng_tracker().set_states(state["layers"])


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's warnings about deprecations and about saving from a single process."""
    with warnings.catch_warnings():
        for message in (".*TypedStorage is deprecated.*", ".*single process.*", ".*is deprecated.*"):
            warnings.filterwarnings("ignore", message=message)
        yield
