"""Modes over the ranks of a group, over a named mesh, and over the ranks that serve."""

from __future__ import annotations

from typing import Any

from rollcast.contracts.dispatch import Calls, DispatchMode, DispatchTarget, Expected, RankCall, RankOutputs
from rollcast.errors import DispatchError
from rollcast_dispatch.sharding import Layout, expect_rows, join_shards, mesh_layout, split_call, split_lists

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
    """Every argument is a list or tuple with one value for each rank; outputs are the list by rank.

    Nothing is split or joined. An argument of another kind or length is refused.
    """

    name = "dp_compute"

    def dispatch(self, worker_group: DispatchTarget, *args: Any, **kwargs: Any) -> Calls:
        return Calls(split_lists(self.name, worker_group.world_size, "ranks", args, kwargs))

    def collect(self, worker_group: DispatchTarget, outputs: RankOutputs) -> Any:
        return list(outputs)


class DpComputeProto(DispatchMode):
    """Each rank works on an equal shard; outputs are joined in rank order.

    A batch whose length the world size does not divide is padded with repeated rows, and what came
    of them is taken off the joined output; workers must then return a row for each row.
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
    """The first positional argument is a function, which every rank gets; the rest as DP_COMPUTE_PROTO.

    On Ray the function travels by pickle: one that the workers can import by reference, a lambda or
    a local function by value.
    """

    name = "dp_compute_proto_with_func"

    def dispatch(self, worker_group: DispatchTarget, *args: Any, **kwargs: Any) -> Calls:
        if not args or not callable(args[0]):
            given = f"a {type(args[0]).__name__}" if args else "no positional argument"
            raise DispatchError(
                f"{self.name}: the first positional argument must be the function that every rank runs, got {given}; "
                "without a function use Dispatch.DP_COMPUTE_PROTO"
            )
        function, *rest = args
        calls, padding = split_call(self.name, worker_group.world_size, rest, kwargs)
        return Calls([RankCall((function, *call.args), call.kwargs) for call in calls], padding)


class DpComputeMetric(DpComputeProto):
    """Split as DP_COMPUTE_PROTO; the result is the list of the outputs by rank, whatever they are.

    Nothing is joined, so what came of padded rows cannot be taken off: it is in the last ranks'
    outputs. Where that matters, call with a length that the world size divides.
    """

    name = "dp_compute_metric"

    def collect(self, worker_group: DispatchTarget, outputs: RankOutputs) -> Any:
        return list(outputs)

    def expect(self, worker_group: DispatchTarget, calls: Calls) -> Expected | None:
        return None


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

    def expect(self, worker_group: DispatchTarget, calls: Calls) -> Expected | None:
        layout, padding = calls.state
        return expect_rows(calls, layout.answering, padding.rows)


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> NdMesh:
    """The mode for ``@register(dispatch_mode=...)`` of methods that run on the mesh ``mesh_name``."""
    return NdMesh(mesh_name)


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
