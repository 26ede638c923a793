"""Lazy n-D mesh dispatch: shards by the data-parallel rank that workers have registered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollcast.controller.dispatch import Calls, DispatchMode, DispatchTarget, RankOutputs
from rollcast.controller.worker import MeshInfo
from rollcast.errors import DispatchError
from rollcast_dispatch.splitting import join_shards, split_call

__all__ = ["NdMesh", "make_nd_compute_dataproto_dispatch_fn"]


class NdMesh(DispatchMode):
    """Ranks that share a ``dp_rank`` in the mesh get the same shard; one of each collects.

    The group asks its workers for their places at the first call and remembers them. A shard that
    several ranks share is stored once.

    Args:
        mesh_name: as the workers gave it to ``register_mesh``.
    """

    name = "nd_mesh"

    def __init__(self, mesh_name: str = "default") -> None:
        self.mesh_name = mesh_name

    def dispatch(self, worker_group: DispatchTarget, *args: Any, **kwargs: Any) -> Calls:
        places = self._places(worker_group)
        shards = max(place.dp_rank for place in places) + 1
        calls, padding = split_call(f"{self.name}({self.mesh_name!r})", shards, args, kwargs)
        return Calls([calls[place.dp_rank] for place in places], padding)

    def collect(self, worker_group: DispatchTarget, outputs: RankOutputs) -> Any:
        places = worker_group.mesh(self.mesh_name)
        collecting = sorted(
            (
                (places[rank].dp_rank, output)
                for rank, output in zip(outputs.ranks, outputs, strict=True)
                if places[rank].is_collect
            ),
            key=lambda entry: entry[0],
        )
        return join_shards(f"{self.name}({self.mesh_name!r})", [output for _, output in collecting], outputs.state)

    def _places(self, worker_group: DispatchTarget) -> Sequence[MeshInfo]:
        places = worker_group.mesh(self.mesh_name)
        present = sorted({place.dp_rank for place in places})
        if present != list(range(len(present))):
            raise DispatchError(
                f"mesh {self.mesh_name!r}: the workers registered the data-parallel ranks {present}; "
                f"they must be 0 to {len(present) - 1} without gaps"
            )
        collecting = sorted(place.dp_rank for place in places if place.is_collect)
        if collecting != present:
            raise DispatchError(
                f"mesh {self.mesh_name!r}: exactly one rank of each data-parallel rank must collect, "
                f"but those that do are of the data-parallel ranks {collecting} (all: {present})"
            )
        return places


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> NdMesh:
    """The mode for ``@register(dispatch_mode=...)`` of methods that run on the mesh ``mesh_name``."""
    return NdMesh(mesh_name)
