"""Dispatch modes over the ranks of a group, over a named mesh, and over the replicas of a rollout server."""

from __future__ import annotations

from typing import Any

from rollcast.contracts.dispatch import Calls, DispatchMode, DispatchTarget, Expected, RankCall, RankOutputs
from rollcast.errors import DispatchError
from rollcast_dispatch.sharding import (
    BatchesOverMesh,
    Layout,
    expect_rows,
    join_shards,
    mesh_layout,
    split_call,
    split_lists,
)

__all__ = [
    "DirectRolloutMethod",
    "DpCompute",
    "DpComputeMetric",
    "DpComputeProto",
    "DpComputeProtoWithFunc",
    "NdMesh",
    "make_nd_compute_dataproto_dispatch_fn",
]


class DpCompute(DispatchMode):
    """Dispatch mode for arguments that are lists or tuples with one value per rank; returns the outputs by rank.

    Nothing is split or joined. An argument of another type or length is refused.
    """

    name = "dp_compute"

    def dispatch(self, worker_group: DispatchTarget, *args: Any, **kwargs: Any) -> Calls:
        return Calls(split_lists(self.name, worker_group.world_size, "ranks", args, kwargs))

    def collect(self, worker_group: DispatchTarget, outputs: RankOutputs) -> Any:
        return list(outputs)


class DpComputeProto(DispatchMode):
    """Dispatch mode that sends an equal shard to each rank and joins the outputs in rank order.

    If the world size does not divide the length of a batch, repeated rows are appended and their outputs are removed
    from the result; workers must then return one row per input row.
    """

    name = "dp_compute_proto"

    def dispatch(self, worker_group: DispatchTarget, *args: Any, **kwargs: Any) -> Calls:
        calls, padding = split_call(self.name, worker_group.world_size, args, kwargs)
        return Calls(calls, padding)

    def collect(self, worker_group: DispatchTarget, outputs: RankOutputs) -> Any:
        return join_shards(self.name, outputs, outputs.state)

    def expect(self, worker_group: DispatchTarget, calls: Calls) -> Expected | None:
        return expect_rows(calls, range(worker_group.world_size), calls.state.rows)


class DpComputeProtoWithFunc(DpComputeProto):
    """Dispatch mode like DP_COMPUTE_PROTO whose first positional argument is a function sent to every rank.

    On Ray, the function is pickled: by reference if the workers can import it, by value if it is a lambda or a local
    function.
    """

    name = "dp_compute_proto_with_func"

    def dispatch(self, worker_group: DispatchTarget, *args: Any, **kwargs: Any) -> Calls:
        if not args or not callable(args[0]):
            problem = f"a {type(args[0]).__name__}" if args else "no positional argument"
            raise DispatchError(
                f"{self.name}: the first positional argument must be the function that every rank runs, got {problem}; "
                "without a function use Dispatch.DP_COMPUTE_PROTO"
            )
        function, *rest = args
        calls, padding = split_call(self.name, worker_group.world_size, rest, kwargs)
        return Calls([RankCall((function, *call.args), call.kwargs) for call in calls], padding)


class DpComputeMetric(DpComputeProto):
    """Dispatch mode that splits like DP_COMPUTE_PROTO and returns the list of outputs by rank, of any type.

    Nothing is joined, so the results of padded rows remain in the outputs of the last ranks. If that matters, use a
    length that the world size divides.
    """

    name = "dp_compute_metric"

    def collect(self, worker_group: DispatchTarget, outputs: RankOutputs) -> Any:
        return list(outputs)

    def expect(self, worker_group: DispatchTarget, calls: Calls) -> Expected | None:
        return None


class NdMesh(BatchesOverMesh):
    """Dispatch mode that sends the same shard to all ranks with the same ``dp_rank`` in a mesh; one of them answers.

    At the first call, the group queries its workers for their places and caches the answers. A shard sent to several
    ranks is stored once.

    Args:
        mesh_name: name of the mesh, as passed to ``register_mesh``.
    """

    name = "nd_mesh"

    def _layout(self, worker_group: DispatchTarget) -> Layout:
        return mesh_layout(worker_group, self.mesh_name)


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> NdMesh:
    """Return the dispatch mode for methods that run on the mesh ``mesh_name``, for ``@register``."""
    return NdMesh(mesh_name)


class DirectRolloutMethod(DispatchMode):
    """Dispatch mode for methods of a rollout server, which sends the arguments to one rank of each replica.

    Nothing is split, padded or joined, and the other ranks of a replica are not called. The result is the list of
    outputs, one per replica, in replica order. A replica is a ``dp_rank`` of the mesh; its rank registered with
    ``is_collect`` is called. For a method that all ranks of a replica must run (a collective), use ONE_TO_ALL.

    Args:
        mesh_name: name of the mesh, as passed to ``register_mesh``.
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
