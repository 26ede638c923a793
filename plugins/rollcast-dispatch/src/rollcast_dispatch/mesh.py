"""Lazy n-D mesh dispatch: shards by the data-parallel rank that workers have registered."""

from __future__ import annotations

from typing import Any

from rollcast.contracts.dispatch import Calls, DispatchMode, DispatchTarget, RankOutputs
from rollcast_dispatch.layout import mesh_layout
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

    def _label(self) -> str:
        return f"{self.name}({self.mesh_name!r})"

    def dispatch(self, worker_group: DispatchTarget, *args: Any, **kwargs: Any) -> Calls:
        layout = mesh_layout(worker_group, self.mesh_name)
        calls, padding = split_call(self._label(), layout.shards, args, kwargs)
        return Calls(layout.spread(calls), (layout, padding), layout.answering)

    def collect(self, worker_group: DispatchTarget, outputs: RankOutputs) -> Any:
        layout, padding = outputs.state
        return join_shards(self._label(), layout.answers(outputs), padding)


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> NdMesh:
    """The mode for ``@register(dispatch_mode=...)`` of methods that run on the mesh ``mesh_name``."""
    return NdMesh(mesh_name)
