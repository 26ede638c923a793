"""Workers of the controller's benchmarks; nothing here imports torch."""

from __future__ import annotations

from rollcast import DataProto, Dispatch, Worker, register
from rollcast_dispatch import make_nd_compute_dataproto_dispatch_fn


class Plain(Worker):
    """Gives back nothing, a small column, or everything."""

    def __init__(self, ranks_a_shard: int = 1) -> None:
        shard, place = divmod(self.rank, ranks_a_shard)
        self.register_mesh("pairs", shard, is_collect=place == 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def nothing(self) -> None:
        """An empty call."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def small(self, data: DataProto) -> DataProto:
        """One number a row."""
        return DataProto.from_dict({"score": data["old_log_probs"][:, 0].clone()})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, data: DataProto) -> DataProto:
        """The batch."""
        return data


class OnPairs(Plain):
    """The same over a mesh."""

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("pairs"))
    def small(self, data: DataProto) -> DataProto:
        return super().small(data)
