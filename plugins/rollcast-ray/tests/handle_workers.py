"""Two groups that hand batches to each other, in a module that Ray's workers can import."""

from __future__ import annotations

from typing import Any

import torch
from controller_workers import Halves

from rollcast import DataProto, Worker, register

WIDTH = 2000


class Shares(Halves):
    """Equal parts in order; what comes back is the list of it."""

    name = "shares"

    def collect(self, worker_group: Any, outputs: Any) -> list[Any]:
        return list(outputs)


class Actor(Worker):
    """Makes wide columns."""

    @register(dispatch_mode=Halves())
    def generate(self, data: DataProto) -> DataProto:
        responses = data["prompts"].repeat(1, WIDTH // 4)
        return data.with_columns({"responses": responses, "score": data["prompts"].float().mean(-1)})

    @register(dispatch_mode=Halves())
    def log_probs(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"old_log_probs": -data["responses"].float().mean(-1)})

    @register(dispatch_mode=Shares())
    def count(self, data: DataProto) -> int:
        return len(data)

    @register(dispatch_mode=Halves())
    def break_down(self, data: DataProto) -> DataProto:
        raise ValueError("no luck")


class Critic(Worker):
    """Reads them."""

    @register(dispatch_mode=Halves())
    def values(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"values": data["responses"].float().mean(-1)})

    @register(dispatch_mode=Shares())
    def update(self, data: DataProto) -> tuple[int, float]:
        torch.testing.assert_close(data["values"], data["responses"].float().mean(-1))
        return len(data), float(data["advantages"].sum())

    @register(dispatch_mode=Shares(), materialize_futures=False)
    def peek(self, data: Any) -> str:
        return str(data.is_remote)

    @register(dispatch_mode=Shares(), materialize_futures=False)
    def first_uid(self, data: Any) -> list[str]:
        return list(data.slice(0, 1)["uid"])
