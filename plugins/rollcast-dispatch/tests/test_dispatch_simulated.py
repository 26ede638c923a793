"""Balanced dispatch of handles over 1,024 simulated ranks: which bytes cross nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rollcast import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register
from rollcast.protocol import DataProto, karmarkar_karp
from rollcast_dispatch.balance import exchange_items
from rollcast_dispatch.token_balanced import TokenBalanced
from rollcast_testing import SimulatedRuntime

NODES, EACH, ROWS, TOKENS = 128, 8, 8192, 512
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


def consume(cluster: SimulatedRuntime, group: WorkerGroup, lengths: torch.Tensor) -> tuple[DataProto, int, float]:
    """Return the result of a balanced call on a handle, the bytes it moved between nodes, and the bytes of a row."""
    produced = group.produce.remote(DataProto.from_dict({"row": torch.arange(ROWS), "length": lengths})).wait()
    row_bytes = produced.get().nbytes / ROWS
    cluster.traffic.clear()
    consumed = group.consume.remote(produced).wait()
    return consumed.get(), cluster.traffic.between_nodes, row_bytes


def test_few_rows_change_node_for_the_balance_and_only_they_move(cluster: SimulatedRuntime) -> None:
    group = WorkerGroup(ResourcePool([EACH] * NODES), ClassWithInitArgs(Producer), runtime=cluster)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(ROWS).log_normal_(6, 1, generator=generator).clamp(1, 4000).to(torch.int64)
    home = torch.arange(ROWS) // (ROWS // RANKS) // EACH
    # Rows of one length stay where they are: what moves are lengths, messages to ranks and the result.
    unmoved, fixed, _ = consume(cluster, group, torch.full((ROWS,), 500))
    assert torch.equal(unmoved["rank"] // EACH, home)
    result, traffic, row_bytes = consume(cluster, group, lengths)
    assert torch.equal(result["row"], torch.arange(ROWS))
    assert torch.equal(result["sum"], 3 * TOKENS * torch.arange(ROWS))
    moved = int((result["rank"] // EACH != home).sum())
    assert 0 < moved < 0.25 * ROWS
    assert 0.9 * moved * row_bytes <= traffic - fixed <= 1.1 * moved * row_bytes
    loads = torch.zeros(RANKS).index_add_(0, result["rank"], lengths.float())
    most_even = exchange_items(karmarkar_karp(lengths.tolist(), RANKS, equal_size=True), lengths.tolist())
    heaviest = max(sum(int(lengths[row]) for row in part) for part in most_even)
    assert float(loads.max()) <= 1.01 * heaviest
