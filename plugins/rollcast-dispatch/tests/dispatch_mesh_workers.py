"""Worker classes in a module that Ray's workers can import."""

from __future__ import annotations

from rollcast import DataProto, Worker, register
from rollcast_dispatch import make_nd_compute_dataproto_dispatch_fn


class Sharded(Worker):
    """Two ranks a model: a shard is computed by both, and the second of them collects."""

    def __init__(self) -> None:
        self.register_mesh("model", self.rank // 2, self.rank % 2 == 1)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("model"))
    def where(self, data: DataProto) -> DataProto:
        return data.with_columns({"rank": data["x"] * 0 + self.rank, "rows": data["x"] * 0 + len(data)})
