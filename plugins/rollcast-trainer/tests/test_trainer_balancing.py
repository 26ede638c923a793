"""Rows over ranks by their tokens: nothing is lost, nothing changes place, and no rank gets more than before."""

from __future__ import annotations

from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcast.protocol import DataProto, Jagged
from rollcast_trainer.batch.balance import deal_rows, row_lengths, seqlen_metrics, spread_rows
from rollcast_trainer.batch.mini_batches import draw_mini_batches, plan_update

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


class Ranks:
    """Splits a batch as a mesh does, into equal shards in a row, and remembers them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.shards: list[list[int]] = []

    def __call__(self, batch: DataProto) -> DataProto:
        padded = batch.pad_to_divisor(self.count)[0] if len(batch) else batch
        self.shards = [row_lengths(shard) for shard in padded.chunk(self.count)] if len(batch) else []
        return DataProto.from_dict({"square": batch["row"] ** 2})

    @property
    def heaviest(self) -> int:
        return max(map(sum, self.shards))


lengths_of_rows = st.lists(st.integers(1, WIDTH), max_size=40)


@given(lengths_of_rows, st.integers(1, 9))
@settings(deadline=None)
def test_results_come_back_in_order_and_no_rank_gets_more(lengths: list[int], ranks: int) -> None:
    batch = make_batch(lengths)
    plain, balanced = Ranks(ranks), Ranks(ranks)
    plain(batch)
    output = spread_rows(balanced, batch, lengths, ranks)
    assert output["square"].tolist() == [row**2 for row in range(len(lengths))]
    if lengths:
        assert len({len(shard) for shard in balanced.shards}) == 1
        assert balanced.heaviest <= plain.heaviest


def test_the_longest_rows_are_not_left_together() -> None:
    batch = make_batch([12, 11, 10, 9, 1, 1, 1, 1])
    plain, balanced = Ranks(2), Ranks(2)
    plain(batch)
    spread_rows(balanced, batch, row_lengths(batch), 2)
    assert (plain.heaviest, balanced.heaviest) == (42, 23)


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
