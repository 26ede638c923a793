"""DP_COMPUTE_PROTO: a shard of the batch for each rank."""

from __future__ import annotations

from typing import Any

from rollcast.controller.dispatch import Calls, DispatchMode, DispatchTarget, RankOutputs
from rollcast_dispatch.splitting import join_shards, split_call

__all__ = ["DpComputeProto"]


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
