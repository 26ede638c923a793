"""Balanced dispatch of handles over 1,024 simulated ranks: which bytes cross nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rollcast import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register
from rollcast.protocol import DataProto
from rollcast_dispatch.token_balanced import TokenBalanced
from rollcast_testing import SimulatedRuntime

NODES, EACH, ROWS, TOKENS = 128, 8, 8192, 128
RANKS = NODES * EACH


class Producer(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def produce(self, data: DataProto) -> DataProto:
        tokens = data["row"][:, None].expand(len(data), TOKENS).contiguous()
        return data.with_columns({"tokens": tokens, "log_probs": tokens.float(), "values": tokens * 2})

    @register(dispatch_mode=TokenBalanced(length_key="length"))
    def consume(self, data: DataProto) -> DataProto:
        sums = {"sum": data["tokens"].sum(1) + data["values"].sum(1), "mean": data["log_probs"].mean(1)}
        return data.select(["row"]).with_columns({**sums, "rank": torch.full((len(data),), self.rank)})


@pytest.fixture(scope="module")
def cluster() -> Iterator[SimulatedRuntime]:
    with SimulatedRuntime(NODES, EACH) as runtime:
        yield runtime


def test_only_the_rows_that_change_node_move_after_balancing(cluster: SimulatedRuntime) -> None:
    group = WorkerGroup(ResourcePool([EACH] * NODES), ClassWithInitArgs(Producer), runtime=cluster)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(ROWS).log_normal_(6, 1, generator=generator).clamp(1, 16000).to(torch.int64)
    produced = group.produce.remote(DataProto.from_dict({"row": torch.arange(ROWS), "length": lengths})).wait()
    row_bytes = produced.get().nbytes / ROWS
    cluster.traffic.clear()
    consumed = group.consume.remote(produced).wait()
    traffic = cluster.traffic.between_nodes
    result = consumed.get()
    assert torch.equal(result["row"], torch.arange(ROWS))
    assert torch.equal(result["sum"], 3 * TOKENS * torch.arange(ROWS))
    home = torch.arange(ROWS) // (ROWS // RANKS) // EACH
    moved = int((result["rank"] // EACH != home).sum())
    assert 0.9 * moved * row_bytes <= traffic <= 1.1 * moved * row_bytes
