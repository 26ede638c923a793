"""Workers for every mode, in a module that Ray's workers import: there the modes are looked up by name again."""

from __future__ import annotations

from typing import Any

import torch

from rollcast import DataProto, Dispatch, Worker, register
from rollcast_dispatch import TokenBalanced


class Modes(Worker):
    """Four ranks: two data-parallel ranks of two stages each, and two rollout replicas of two ranks."""

    def __init__(self) -> None:
        dp_rank, pp_rank = divmod(self.rank, 2)
        self.register_mesh("default", dp_rank, pp_rank == 1, coords={"pp": pp_rank})
        self.register_mesh("rollout", dp_rank, pp_rank == 0)

    def marked(self, data: DataProto) -> DataProto:
        return data.with_columns({"rank": torch.full((len(data),), self.rank), "rows": data["x"] * 0 + len(data)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def own_value(self, value: Any) -> tuple[int, Any]:
        return self.rank, value

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def proto(self, data: DataProto) -> DataProto:
        return self.marked(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def with_function(self, function: Any, data: DataProto) -> DataProto:
        return function(self, data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def metric(self, data: DataProto) -> dict[str, Any]:
        return {"rank": self.rank, "sum": int(data["x"].sum())}

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def by_dp(self, data: DataProto) -> DataProto:
        return self.marked(data)

    @register(dispatch_mode=Dispatch.MEGATRON_PP_AS_DP_PROTO)
    def by_stage(self, data: DataProto) -> DataProto:
        return self.marked(data)

    @register(dispatch_mode=Dispatch.MEGATRON_PP_ONLY)
    def names(self) -> str:
        return f"layers of rank {self.rank}"

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    def ask(self, question: str) -> str:
        return f"{question} {self.rank}"

    @register(dispatch_mode=TokenBalanced("default", length_key="length", group_key="id"))
    def balanced(self, data: DataProto) -> DataProto:
        return self.marked(data)

    @register(dispatch_mode=Dispatch.TOKEN_BALANCED)
    def balanced_by_mask(self, data: DataProto) -> DataProto:
        return self.marked(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def modes(self) -> dict[str, str]:
        """Name → class of every mode, as this process finds them."""
        return {name: type(getattr(Dispatch, name)).__name__ for name in Dispatch}
