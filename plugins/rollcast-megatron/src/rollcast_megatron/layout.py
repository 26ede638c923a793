"""The mesh of a worker group, in which each rank holds a part of the model and a shard of a batch."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rollcast.errors import ConfigError
from rollcast_engine.process_group import join_process_group
from rollcast_megatron import cpu

if TYPE_CHECKING:
    from rollcast.contracts.worker import WorkerContext
    from rollcast_megatron.schemas import MegatronConfig

__all__ = ["Mesh", "join_mesh"]


@dataclass(frozen=True, eq=False)
class Mesh:
    """This rank's tensor-, context-, pipeline- and data-parallel ranks, and its process group along each dimension.

    Expert-parallel ranks are consecutive data-parallel ranks that share the experts of one copy of the model. Ranks of
    ``expert_data_rank`` 0 hold the first copy.

    megatron-core has one mesh per process, which all engines of the process share.
    """

    world_size: int
    tensor_size: int
    context_size: int
    pipeline_size: int
    data_size: int
    tensor_rank: int
    context_rank: int
    pipeline_rank: int
    data_rank: int
    tensor_group: Any
    context_group: Any
    pipeline_group: Any
    data_group: Any
    expert_size: int = 1
    expert_rank: int = 0
    expert_data_rank: int = 0
    expert_group: Any = None

    @property
    def is_first_stage(self) -> bool:
        """True if this stage holds the embedding."""
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True if this stage holds the head."""
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Tensor-, context-, pipeline- and expert-parallel size."""
        return self.tensor_size, self.context_size, self.pipeline_size, self.expert_size

    def stage_rank(self, stage: int) -> int:
        """Return the global rank of a stage in this rank's pipeline."""
        return dist.get_global_rank(self.pipeline_group, stage)


@dataclass
class _Process:
    """The mesh of this process, the process group that it was built from, and the engines that use it."""

    mesh: Mesh | None = None
    world: Any = None
    engines: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)


_current = _Process()


def join_mesh(engine: object, config: MegatronConfig, context: WorkerContext, seed: int) -> Mesh:
    """Return the mesh of the group's ranks; all of them must call.

    Args:
        engine: engine that uses the mesh; while it is alive, this process cannot build another mesh.
        config: the engine's config.
        context: context of the worker.
        seed: seed of random numbers in layers (dropout), varied between ranks that hold different parts.

    Raises:
        ConfigError: the process has another mesh, or belongs to a process group of another size.
    """
    from megatron.core import parallel_state

    cpu.install()
    join_process_group(context)
    sizes = config.mesh_sizes
    current, same_world = _current.mesh, _current.world is dist.group.WORLD
    if current is not None and same_world and current.sizes == sizes:
        _current.engines.add(engine)
        return current
    if current is not None:
        _leave(current, sizes, same_world)
    tensor, context_size, pipeline, expert = sizes
    parallel_state.initialize_model_parallel(
        tensor, pipeline, context_parallel_size=context_size, expert_model_parallel_size=expert
    )
    mesh = _read_mesh()
    _seed_layers(seed, mesh)
    _current.mesh, _current.world = mesh, dist.group.WORLD
    _current.engines.add(engine)
    return mesh


def _leave(mesh: Mesh, sizes: tuple[int, int, int, int], same_world: bool) -> None:
    from megatron.core import parallel_state

    gc.collect()
    if same_world and len(_current.engines):
        raise ConfigError(
            f"this process already holds a model that is split {mesh.tensor_size} (tensor) x {mesh.context_size} "
            f"(context) x {mesh.pipeline_size} (pipeline) x {mesh.expert_size} (expert) ways, and all megatron engines "
            f"of a process must be split alike; tensor_model_parallel_size={sizes[0]}, "
            f"context_parallel_size={sizes[1]}, pipeline_model_parallel_size={sizes[2]} and "
            f"expert_model_parallel_size={sizes[3]} were requested"
        )
    _current.engines.clear()
    parallel_state.destroy_model_parallel()


def _seed_layers(seed: int, mesh: Mesh) -> None:
    from megatron.core import tensor_parallel

    # Tensor-parallel ranks share a seed; megatron-core varies it where they must differ.
    part = (mesh.data_rank * mesh.context_size + mesh.context_rank) * mesh.pipeline_size + mesh.pipeline_rank
    own = seed * 1_000_003 + part
    # Without an accelerator the seeding below would also seed the process's own random numbers.
    with torch.random.fork_rng(devices=[]):
        tensor_parallel.model_parallel_cuda_manual_seed(own, force_reset_rng=True)


def _read_mesh() -> Mesh:
    from megatron.core import parallel_state as state

    return Mesh(
        world_size=dist.get_world_size(),
        tensor_size=state.get_tensor_model_parallel_world_size(),
        context_size=state.get_context_parallel_world_size(),
        pipeline_size=state.get_pipeline_model_parallel_world_size(),
        data_size=state.get_data_parallel_world_size(),
        tensor_rank=state.get_tensor_model_parallel_rank(),
        context_rank=state.get_context_parallel_rank(),
        pipeline_rank=state.get_pipeline_model_parallel_rank(),
        data_rank=state.get_data_parallel_rank(),
        tensor_group=state.get_tensor_model_parallel_group(),
        context_group=state.get_context_parallel_group(),
        pipeline_group=state.get_pipeline_model_parallel_group(),
        data_group=state.get_data_parallel_group(),
        expert_size=state.get_expert_model_parallel_world_size(),
        expert_rank=state.get_expert_model_parallel_rank(),
        expert_data_rank=state.get_expert_data_parallel_rank(),
        expert_group=state.get_expert_model_parallel_group(),
    )
