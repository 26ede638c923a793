"""Checkpoints whose tensors megatron-core's dist_checkpointing stores; see :mod:`rollcast_engine.sharded_checkpoint`.

The shards are in megatron-core's torch_dist format. Each layer has its own key, and so has each entry of the
optimizer's state, in the shape of its parameter: any mesh can read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from rollcast.errors import CheckpointError
from rollcast_engine.checkpoint_files import SHARDS, describe_failure
from rollcast_engine.rng import capture_rng, restore_rng
from rollcast_engine.sharded_checkpoint import READ_ERRORS, ShardedState, Sums
from rollcast_megatron.weights import VALUE_HEAD

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast.contracts.engine import ModelType
    from rollcast_megatron.layout import Mesh
    from rollcast_megatron.lora import AdapterPlan
    from rollcast_megatron.module import Stage
    from rollcast_megatron.optimizer import StageOptimizer
    from rollcast_megatron.weights import Shapes

__all__ = ["EngineState"]

#: Each layer has its own keys, so that another mesh can split the stages anywhere.
_METADATA = {"non_homogeneous_layers": True}


@dataclass(frozen=True)
class EngineState(ShardedState):
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

    engine: ClassVar[str] = "megatron"
    values: ClassVar[Mapping[str, type]] = {"mesh": dict, "optimizer_steps": int}
    model_type: ModelType
    rank: int
    mesh: Mesh
    model: Stage
    optimizer: StageOptimizer | None
    shapes: Shapes
    dtype: torch.dtype
    schedule_step: int
    adapter: AdapterPlan | None = None

    @property
    def world_size(self) -> int:  # type: ignore[override]
        return self.mesh.world_size

    @property
    def trains(self) -> bool:  # type: ignore[override]
        return self.optimizer is not None

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

    def describe(self) -> dict[str, Any]:
        steps = 0 if self.optimizer is None else self.optimizer.steps_taken()
        return {"mesh": self.mesh_sizes(), "optimizer_steps": steps}

    def start_writing(
        self, folder: Path, in_background: bool, group: dist.ProcessGroup | None
    ) -> Callable[[], Sums | None]:
        from megatron.core import dist_checkpointing

        from rollcast_megatron.writer import ShardWriter

        tensors = _sharded(self, self.optimizer)
        writer = ShardWriter(folder)
        # Writes all but the shards.
        dist_checkpointing.save(_copied(tensors) if in_background else tensors, str(folder), sharded_strategy=writer)

        def complete() -> Sums | None:
            writer.write(group)
            return writer.sums

        return complete

    def check_files(self, folder: Path) -> None:
        _check_common(folder / "common.pt")

    def read(self, path: Path, summary: Mapping[str, Any]) -> None:
        tensors = _read(path, self, self.optimizer if summary["has_optimizer"] else None)
        with torch.no_grad():
            for name, parameter in self.tensors().items():
                parameter.copy_(tensors[f"model.{name}"])
                if self.optimizer is not None and parameter.requires_grad:
                    moments = {key: tensors[f"optimizer.{key}.{name}"] for key in self.optimizer.state_names}
                    self.optimizer.restore(parameter, moments)
        if self.optimizer is not None:
            self.optimizer.set_steps_taken(summary["optimizer_steps"])

    def is_same_layout(self, summary: Mapping[str, Any]) -> bool:
        return bool(summary["mesh"] == self.mesh_sizes())

    def describe_layout(self, summary: Mapping[str, Any]) -> str:
        return f"the mesh {summary['mesh']}"

    @property
    def random_stream(self) -> int:
        return self.mesh.data_rank * self.mesh.context_size + self.mesh.context_rank

    def capture_rng(self) -> dict[str, Any]:
        """Return the random state of the process and of the layers."""
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        layers = {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()}
        return {"process": capture_rng(), "layers": layers}

    def restore_rng(self, state: dict[str, Any]) -> None:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        restore_rng(state["process"])
        get_cuda_rng_tracker().set_states(state["layers"])


def _copied(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries with copies of their tensors in host memory."""
    return {
        name: replace(entry, data=entry.data.detach().to("cpu", copy=True))
        if isinstance(entry.data, torch.Tensor)
        else entry
        for name, entry in tensors.items()
    }


def _check_common(file: Path) -> None:
    """Check that a file that megatron-core will unpickle holds only tensors and plain values.

    torch's restricted loader is megatron-core's default too, but an environment variable
    (``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD``) turns it off there.

    Raises:
        CheckpointError: the file is missing or damaged, or names code.
    """
    try:
        torch.load(file, map_location="cpu", weights_only=True)
    except READ_ERRORS as error:
        raise CheckpointError(f"{file} is not a file of plain values: {describe_failure(error)}") from error


def _sharded(state: EngineState, optimizer: StageOptimizer | None) -> dict[str, Any]:
    """Return this rank's tensors, each with its position in the whole model."""
    model = state.model.sharded_state_dict(_METADATA)
    # Transformer Engine's extra state is that of 8 bits, which layers without it do not have.
    wanted = {name: entry for name, entry in model.items() if "._extra_state" not in name}
    tensors = {f"model.{name}": entry for name, entry in wanted.items() if entry.data is not None}
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
        loaded: dict[str, Tensor] = dist_checkpointing.load(wanted, str(path / SHARDS))
    except READ_ERRORS as error:
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
