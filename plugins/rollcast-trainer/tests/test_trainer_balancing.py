"""Rows over ranks by their tokens: nothing is lost, nothing changes place, and no rank gets more than before."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcast import ClassWithInitArgs, ResourcePool, Worker, WorkerGroup, register
from rollcast.protocol import DataProto, Jagged
from rollcast_dispatch import make_token_balanced_dispatch_fn
from rollcast_testing import SimulatedRuntime
from rollcast_trainer.batch.balance import deal_rows, row_lengths, seqlen_metrics
from rollcast_trainer.batch.mini_batches import draw_mini_batches, plan_update
from rollcast_trainer.workers.meter import Meter
from rollcast_trainer.workers.role_group import RoleGroup

WIDTH = 12


def make_batch(lengths: list[int]) -> DataProto:
    sizes = torch.tensor(lengths, dtype=torch.int64)
    responses = Jagged.from_lengths(torch.ones(sum(lengths), dtype=torch.bool), sizes)
    prompts = Jagged.from_lengths(torch.zeros(0, dtype=torch.int32), torch.zeros_like(sizes))
    columns = {"prompts": prompts, "responses": responses, "response_mask": responses}
    return DataProto(columns, length=len(lengths)).with_columns({"row": torch.arange(len(lengths))})


def chosen(batch: DataProto) -> torch.Tensor:
    """Tokens under the mask of each row."""
    return Jagged.of(batch["response_mask"]).sums()


class Squares(Worker):
    def __init__(self) -> None:
        self.register_mesh("model", self.rank, True)

    @register(dispatch_mode=make_token_balanced_dispatch_fn("model"), rows="same")
    def square(self, data: DataProto) -> DataProto:
        """Return the square of each row's number, the rank that computed it and the rank's tokens."""
        here = torch.full((len(data),), self.rank), torch.full((len(data),), sum(row_lengths(data)))
        return DataProto.from_dict({"square": data["row"] ** 2, "rank": here[0], "tokens": here[1]})


@pytest.fixture(scope="module")
def squares() -> Iterator[WorkerGroup]:
    with SimulatedRuntime(1, 2) as runtime:
        yield WorkerGroup(ResourcePool([2]), ClassWithInitArgs(Squares), runtime=runtime)


@pytest.mark.parametrize(("balances", "heaviest"), [(True, 23), (False, 42)])
def test_a_call_on_a_role_spreads_the_longest_rows_if_it_balances(squares, balances: bool, heaviest: int) -> None:
    role = RoleGroup("actor", "actor", squares, Meter(), balances, WIDTH)
    output = role.infer(Squares.square, make_batch([12, 11, 10, 9, 1, 1, 1, 1]), ["square", "rank", "tokens"])
    assert output["square"].tolist() == [row**2 for row in range(8)]
    assert int(output["tokens"].max()) == heaviest
    assert balances or output["rank"].tolist() == [0] * 4 + [1] * 4


@given(st.lists(st.integers(0, 50), max_size=10), st.integers(1, 6))
def test_dealing(some: list[int], parts: int) -> None:
    lengths = some * parts
    dealt = deal_rows(lengths, parts)
    assert sorted(row for part in dealt for row in part) == list(range(len(lengths)))
    assert {len(part) for part in dealt} <= {len(some)}
    in_turn = [sum(lengths[part::parts]) for part in range(parts)]
    assert max(sum(lengths[row] for row in part) for part in dealt) <= max(in_turn)


@given(st.lists(st.integers(0, 50), max_size=10), st.integers(1, 6), st.randoms(use_true_random=False))
def test_dealing_rows_that_lie_with_ranks(some: list[int], parts: int, random: Random) -> None:
    lengths = some * parts
    dealt = deal_rows(lengths, parts, [random.randrange(parts) for _ in lengths])
    assert sorted(row for part in dealt for row in part) == list(range(len(lengths)))
    assert {len(part) for part in dealt} <= {len(some)}
    heaviest, least = (
        max(sum(lengths[row] for row in part) for part in each) for each in (dealt, deal_rows(lengths, parts))
    )
    assert heaviest <= 1.01 * least
    assert heaviest <= max(sum(lengths[part::parts]) for part in range(parts))


def test_most_rows_of_an_update_stay_with_their_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(512).log_normal_(4, 1, generator=generator).clamp(1, 800).long().tolist()
    ranks = 8
    mini_batches, _ = draw_mini_batches(512, 2, 1, seed=0)
    arranged, _ = plan_update(make_batch(lengths), mini_batches, ranks, 800, lengths=lengths)
    home = arranged["row"] // (512 // ranks)
    there = torch.arange(ranks).repeat_interleave(512 // ranks)
    assert int((home == there).sum()) > 0.7 * 512


@given(
    st.lists(st.integers(1, WIDTH), min_size=1, max_size=24), st.integers(1, 4), st.integers(1, 6), st.integers(0, 99)
)
@settings(deadline=None)
def test_a_balanced_update_has_the_same_mini_batches(lengths: list[int], count: int, ranks: int, seed: int) -> None:
    batch = make_batch(lengths)
    mini_batches, _ = draw_mini_batches(len(lengths), min(count, len(lengths)), 1, seed)
    plain, plan = plan_update(batch, mini_batches, ranks, WIDTH)
    balanced, same_plan = plan_update(batch, mini_batches, ranks, WIDTH, lengths=row_lengths(batch))
    assert same_plan == plan
    start = 0
    for rows, per_rank in zip(mini_batches, plan.rows_per_rank, strict=True):
        shards = [shard.slice(start, start + per_rank) for shard in balanced.chunk(ranks)]
        before = [shard.slice(start, start + per_rank) for shard in plain.chunk(ranks)]
        start += per_rank
        real = [row for shard in shards for row in shard["row"][chosen(shard) > 0].tolist()]
        assert sorted(real) == sorted(rows.tolist())
        # Filler takes part in the passes, so it counts here.
        assert max(sum(row_lengths(shard)) for shard in shards) <= max(sum(row_lengths(shard)) for shard in before)


def test_filler_is_the_shortest_row_of_the_mini_batch() -> None:
    batch = make_batch([9, 2, 8, 1])
    arranged, _ = plan_update(batch, [torch.tensor([0, 1, 2])], 2, WIDTH, lengths=row_lengths(batch))
    filler = arranged["row"][chosen(arranged) == 0]
    assert filler.tolist() == [1]


def test_the_numbers_of_a_step() -> None:
    metrics = seqlen_metrics([9, 7, 1, 2, 2, 3], 3)
    assert metrics == {
        "global_seqlen/min": 3.0,
        "global_seqlen/max": 16.0,
        "global_seqlen/minmax_diff": 13.0,
        "global_seqlen/balanced_min": 5.0,
        "global_seqlen/balanced_max": 10.0,
        "global_seqlen/mean": 8.0,
    }
    assert seqlen_metrics([5, 1], 4)["global_seqlen/balanced_min"] == 0.0
