"""Modes over the ranks of a group, each of which is a data-parallel rank of its own."""

from __future__ import annotations

from typing import Any

from rollcast.contracts.dispatch import Calls, DispatchMode, DispatchTarget, RankCall, RankOutputs
from rollcast.errors import DispatchError
from rollcast_dispatch.splitting import join_shards, split_call, split_lists

__all__ = ["DpCompute", "DpComputeMetric", "DpComputeProto", "DpComputeProtoWithFunc"]


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
