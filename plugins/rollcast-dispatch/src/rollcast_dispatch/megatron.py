"""Dispatch modes over a mesh with pipeline stages, as used by Megatron engines.

Each rank registers its place once, usually in ``init_model``::

    self.register_mesh("default", dp_rank, is_collect, coords={"tp": tp_rank, "pp": pp_rank})

Add further dimensions whose ranks work on the same rows, such as ``cp``, to ``coords``. These modes select the
answering ranks by ``coords``, not by ``is_collect``: the *first* rank of a pipeline stage is the rank whose coordinates
except ``pp`` are all 0.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from rollcast.contracts.dispatch import Calls, DispatchTarget, MeshInfo, RankCall, RankOutputs
from rollcast.errors import DispatchError
from rollcast_dispatch.sharding import BatchesOverMesh, Layout, OverMesh, split_lists

__all__ = [
    "MegatronCompute",
    "MegatronComputeProto",
    "MegatronPpAsDp",
    "MegatronPpAsDpProto",
    "MegatronPpOnly",
    "PipelineGrid",
]


class PipelineGrid:
    """The ranks of a mesh by data-parallel rank and pipeline stage.

    Args:
        mesh_name: name of the mesh, for messages.
        places: each rank's place, by rank; missing coordinates are 0.

    Attributes:
        dp_size, pp_size: number of data-parallel ranks and of pipeline stages.

    Raises:
        DispatchError: the places do not cover every point of a grid exactly once.
    """

    def __init__(self, mesh_name: str, places: Sequence[MeshInfo]) -> None:
        names = sorted({name for place in places for name in place.coords} - {"pp"})
        points = [
            (place.dp_rank, place.coords.get("pp", 0), *(place.coords.get(name, 0) for name in names))
            for place in places
        ]
        sizes = [max(values) + 1 for values in zip(*points, strict=True)]
        if len(set(points)) != len(points) or math.prod(sizes) != len(points):
            raise DispatchError(_explain(mesh_name, ["dp", "pp", *names], points, sizes))
        self.dp_size, self.pp_size = sizes[:2]
        self._dp_and_pp = [point[:2] for point in points]
        self._first = {point[:2]: rank for rank, point in enumerate(points) if not any(point[2:])}

    def by_dp(self) -> Layout:
        """Return a layout with one shard per data-parallel rank; the first rank of its last stage answers."""
        last = self.pp_size - 1
        return Layout(
            tuple(dp for dp, _ in self._dp_and_pp), tuple(self._first[dp, last] for dp in range(self.dp_size))
        )

    def by_dp_and_pp(self) -> Layout:
        """Return a layout with one shard per stage of each data-parallel rank; the first rank of the stage answers."""
        return Layout(
            tuple(dp * self.pp_size + pp for dp, pp in self._dp_and_pp),
            tuple(self._first[dp, pp] for dp in range(self.dp_size) for pp in range(self.pp_size)),
        )

    def stages(self) -> list[int]:
        """Return the first rank of each stage of data-parallel rank 0."""
        return [self._first[0, pp] for pp in range(self.pp_size)]


def _explain(mesh_name: str, names: list[str], points: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> str:
    grid = " x ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))
    seen: dict[tuple[int, ...], int] = {}
    for rank, point in enumerate(points):
        if point in seen:
            place = ", ".join(f"{name} {value}" for name, value in zip(names, point, strict=True))
            fault = f"ranks {seen[point]} and {rank} are both at {place}"
            break
        seen[point] = rank
    else:
        fault = f"a grid of {grid} has {math.prod(sizes)} places, but there are {len(points)} ranks"
    return (
        f"mesh {mesh_name!r}: {fault}; every rank must say its own place: "
        f"register_mesh({mesh_name!r}, dp_rank, is_collect, coords={{'tp': tp_rank, 'pp': pp_rank}})"
    )


class _OverGrid(OverMesh):
    """Base class of dispatch modes over the pipeline grid of a mesh."""

    def _grid(self, worker_group: DispatchTarget) -> PipelineGrid:
        return PipelineGrid(self.mesh_name, worker_group.mesh(self.mesh_name))


class _ListsOverGrid(_OverGrid):
    """Base class for arguments that are lists with one value per shard; returns the list of the shards' outputs."""

    unit = "shards"

    @abstractmethod
    def _layout(self, worker_group: DispatchTarget) -> Layout: ...

    def dispatch(self, worker_group: DispatchTarget, *args: Any, **kwargs: Any) -> Calls:
        layout = self._layout(worker_group)
        calls = split_lists(self._label(), layout.shards, self.unit, args, kwargs)
        return Calls(layout.spread(calls), layout, layout.answering)

    def collect(self, worker_group: DispatchTarget, outputs: RankOutputs) -> Any:
        layout: Layout = outputs.state
        return layout.answers(outputs)


class MegatronCompute(_ListsOverGrid):
    """Dispatch mode for arguments that are lists or tuples with one value per data-parallel rank.

    All tensor- and pipeline-parallel ranks of a data-parallel rank get its value. The result is a list by data-parallel
    rank of the output of the first rank of its last pipeline stage.
    """

    name = "megatron_compute"
    unit = "data-parallel ranks"

    def _layout(self, worker_group: DispatchTarget) -> Layout:
        return self._grid(worker_group).by_dp()


class MegatronComputeProto(_OverGrid, BatchesOverMesh):
    """Dispatch mode that sends one shard to all tensor- and pipeline-parallel ranks of each data-parallel rank.

    Outputs of the first rank of each data-parallel rank's last pipeline stage are joined, in order.
    Splitting, padding and joining are those of DP_COMPUTE_PROTO.
    """

    name = "megatron_compute_proto"

    def _layout(self, worker_group: DispatchTarget) -> Layout:
        return self._grid(worker_group).by_dp()


class MegatronPpAsDp(_ListsOverGrid):
    """Dispatch mode for pipeline stages with their own data, from lists of ``dp_size * pp_size`` values.

    Value ``dp_rank * pp_size + pp_rank`` is sent to all tensor-parallel ranks of this stage. The result is a list of
    the output of the first rank of each stage, in the same order.
    """

    name = "megatron_pp_as_dp"
    unit = "pipeline stages of all data-parallel ranks"

    def _layout(self, worker_group: DispatchTarget) -> Layout:
        return self._grid(worker_group).by_dp_and_pp()


class MegatronPpAsDpProto(_OverGrid, BatchesOverMesh):
    """Dispatch mode with one shard per pipeline stage of each data-parallel rank, ``dp_size * pp_size`` in total.

    The stages of a data-parallel rank get adjacent shards. Outputs of the first rank of each
    stage are joined in the same order. Splitting, padding and joining are those of DP_COMPUTE_PROTO.
    """

    name = "megatron_pp_as_dp_proto"

    def _layout(self, worker_group: DispatchTarget) -> Layout:
        return self._grid(worker_group).by_dp_and_pp()


class MegatronPpOnly(_OverGrid):
    """Dispatch mode that sends the same arguments to every rank and returns a list by pipeline stage.

    The output of a stage is that of the first rank of data-parallel rank 0. Use it for values that are equal on all
    tensor- and data-parallel ranks, such as the names of a stage's parameters.
    """

    name = "megatron_pp_only"

    def dispatch(self, worker_group: DispatchTarget, *args: Any, **kwargs: Any) -> Calls:
        stages = self._grid(worker_group).stages()
        return Calls([RankCall(args, kwargs)] * worker_group.world_size, stages, stages)

    def collect(self, worker_group: DispatchTarget, outputs: RankOutputs) -> Any:
        by_rank = dict(zip(outputs.ranks, outputs, strict=True))
        return [by_rank[rank] for rank in outputs.state]
