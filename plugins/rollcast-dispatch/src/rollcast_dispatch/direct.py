"""DIRECT_ROLLOUT_METHOD: a call to the ranks that serve, as it is."""

from __future__ import annotations

from typing import Any

from rollcast.contracts.dispatch import Calls, DispatchMode, DispatchTarget, RankCall, RankOutputs
from rollcast_dispatch.layout import Layout, mesh_layout

__all__ = ["DirectRolloutMethod"]


class DirectRolloutMethod(DispatchMode):
    """For methods of a rollout server: the rank that speaks for each replica gets the very arguments.

    Nothing is split, padded or joined, and the other ranks of a replica are not called. The result
    is the list of outputs, one a replica, in replica order. A replica is a ``dp_rank`` of the mesh,
    and the rank of it that registered with ``is_collect`` speaks for it. For a method that all
    ranks of a replica must enter (a collective) use ONE_TO_ALL.

    Args:
        mesh_name: as the workers gave it to ``register_mesh``.
    """

    name = "direct_rollout_method"

    def __init__(self, mesh_name: str = "rollout") -> None:
        self.mesh_name = mesh_name

    def dispatch(self, worker_group: DispatchTarget, *args: Any, **kwargs: Any) -> Calls:
        layout = mesh_layout(worker_group, self.mesh_name)
        call, serving = RankCall(args, kwargs), set(layout.answering)
        return Calls([call if rank in serving else None for rank in range(worker_group.world_size)], layout)

    def collect(self, worker_group: DispatchTarget, outputs: RankOutputs) -> Any:
        layout: Layout = outputs.state
        return layout.answers(outputs)
