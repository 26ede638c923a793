"""The batch algebra: rows, mini-batches and shards, for every size."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcast.contracts.algorithm import AdvantageInputs, advantages, needs_of
from rollcast.errors import ConfigError
from rollcast.protocol import DataProto, Jagged
from rollcast_algorithms.schemas import AlgorithmConfig
from rollcast_trainer.batch.groups import mean_interval
from rollcast_trainer.batch.mini_batches import count_denominators, draw_mini_batches, plan_update
from rollcast_trainer.batch.sizes import BatchAlgebra
from rollcast_trainer.stages.advantage import estimate_advantages

WIDTH = 5


def make_batch(lengths: list[int]) -> DataProto:
    mask = Jagged.from_lengths(torch.ones(sum(lengths), dtype=torch.bool), torch.tensor(lengths))
    return DataProto.from_dict(
        {"response_mask": mask.column(), "row": torch.arange(len(lengths)), "payload": 7 * torch.tensor(lengths)}
    )


def chosen(batch: DataProto) -> torch.Tensor:
    """Tokens under the mask of each row."""
    return Jagged.of(batch["response_mask"]).sums()


@st.composite
def updates(draw: st.DrawFn) -> tuple[list[int], list[torch.Tensor], int, torch.Tensor | None]:
    lengths = draw(st.lists(st.integers(1, WIDTH), min_size=1, max_size=24))
    count = draw(st.integers(1, len(lengths)))
    seed = draw(st.none() | st.integers(0, 99))
    mini_batches, _ = draw_mini_batches(len(lengths), count, 1, seed)
    skip = draw(st.none() | st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)).map(torch.tensor))
    return lengths, mini_batches, draw(st.integers(1, 7)), skip


@given(updates())
@settings(deadline=None)
def test_every_row_is_once_in_its_mini_batch_on_some_rank(
    update: tuple[list[int], list[torch.Tensor], int, torch.Tensor | None],
) -> None:
    lengths, mini_batches, dp_size, skip = update
    batch = make_batch(lengths)
    arranged, plan = plan_update(batch, mini_batches, dp_size, WIDTH, skip_rows=skip)
    assert len(arranged) == dp_size * sum(plan.rows_per_rank)
    start = 0
    for rows, per_rank, counts in zip(mini_batches, plan.rows_per_rank, plan.denominators, strict=True):
        parts = [shard.slice(start, start + per_rank) for shard in arranged.chunk(dp_size)]
        start += per_rank
        present = [part["row"][chosen(part) > 0].tolist() for part in parts]
        kept = [row for row in rows.tolist() if skip is None or not skip[row]]
        assert sorted(row for part in present for row in part) == sorted(kept)
        assert max(map(len, present)) - min(map(len, present)) <= 1
        # What the losses divide by does not know of shards, filler or rows left out.
        assert counts.tokens == sum(lengths[row] for row in rows.tolist())
        assert counts.sequences == len(rows)
        assert counts.max_tokens == WIDTH
        in_batch = sum(int(chosen(part).sum()) for part in parts)
        assert in_batch == (counts.tokens if counts.present_tokens is None else counts.present_tokens)


@given(updates())
@settings(deadline=None)
def test_rows_keep_their_columns_and_the_batch_is_untouched(
    update: tuple[list[int], list[torch.Tensor], int, torch.Tensor | None],
) -> None:
    lengths, mini_batches, dp_size, skip = update
    batch = make_batch(lengths)
    arranged, _ = plan_update(batch, mini_batches, dp_size, WIDTH, skip_rows=skip)
    whole = make_batch(lengths)
    assert torch.equal(arranged["payload"], whole["payload"][arranged["row"]])
    assert batch.equal(whole)


def test_all_rows_skipped_leaves_one_masked_row_a_rank() -> None:
    batch = make_batch([3, 4])
    arranged, plan = plan_update(batch, [torch.tensor([0, 1])], 3, WIDTH, skip_rows=torch.tensor([True, True]))
    assert plan.rows_per_rank == (1,)
    assert chosen(arranged).sum() == 0
    assert (plan.denominators[0].tokens, plan.denominators[0].present_tokens) == (7.0, 0.0)


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 4), st.integers(0, 1000))
@settings(deadline=None)
def test_each_epoch_has_every_row_once(rows: int, count: int, epochs: int, seed: int) -> None:
    count = min(count, rows)
    mini_batches, repeats = draw_mini_batches(rows, count, epochs, seed)
    assert repeats == 1
    drawn = torch.cat(mini_batches)
    assert len(drawn) == rows * epochs
    assert all(sorted(epoch.tolist()) == list(range(rows)) for epoch in drawn.split(rows))
    again, _ = draw_mini_batches(rows, count, epochs, seed)
    assert all(torch.equal(a, b) for a, b in zip(mini_batches, again, strict=True))


def test_epochs_are_shuffled_anew_and_by_the_seed() -> None:
    drawn, _ = draw_mini_batches(32, 1, 2, seed=3)
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], draw_mini_batches(32, 1, 2, seed=4)[0][0])


def test_without_shuffling_the_batch_is_cut_in_order_and_gone_through_again() -> None:
    drawn, repeats = draw_mini_batches(6, 3, 2, seed=None)
    assert [part.tolist() for part in drawn] == [[0, 1], [2, 3], [4, 5]]
    assert repeats == 2


def test_denominators_count_tokens_and_rows_with_any() -> None:
    counts = count_denominators(torch.tensor([2, 0, 2]), 3)
    assert (counts.tokens, counts.sequences, counts.max_tokens, counts.present_tokens) == (4.0, 2.0, 3.0, None)


@given(st.integers(1, 200), st.integers(1, 300))
def test_sizes_that_do_not_divide_are_answered_with_sizes_that_do(prompts: int, mini_batch: int) -> None:
    def check(prompts: int, mini_batch: int) -> None:
        BatchAlgebra(prompts, 2, mini_batch, 1, 1).check()

    if prompts % mini_batch == 0:
        check(prompts, mini_batch)
        return
    with pytest.raises(ConfigError, match=f"data.train_batch_size={prompts} .*={mini_batch};") as refused:
        check(prompts, mini_batch)
    nearest = str(refused.value).partition("nearest valid:")[2]
    mini_batches = re.search(r"actor.ppo_mini_batch_size=(\d+)(?: or (\d+))?", nearest)
    batches = re.search(r"data.train_batch_size=(\d+)(?: or (\d+))?", nearest)
    assert mini_batches is not None
    assert batches is not None
    for size in filter(None, mini_batches.groups()):
        check(prompts, int(size))
    for size in filter(None, batches.groups()):
        check(int(size), mini_batch)


def test_the_algebra_in_words() -> None:
    words = BatchAlgebra(6, 5, 3, 2, 4, micro_batch_rows=2).describe()
    assert "6 prompts x 5 samples = 30 rows" in words
    assert "2 mini-batches of 15 rows x 2 epochs = 4 optimizer steps" in words
    assert "4 rows of a mini-batch on each of 4 ranks, in passes of at most 2 rows" in words
    assert "1 prompt x 1 sample = 1 row a step; 1 mini-batch of 1 row x 1 epoch = 1 optimizer step" in (
        BatchAlgebra(1, 1, 1, 1, 1).describe()
    )
    assert "passes of at most 99 tokens" in BatchAlgebra(6, 5, 3, 2, 4, 2, micro_batch_tokens=99).describe()


@pytest.mark.parametrize(
    "name",
    ["gae", "gae_turn", "gigpo", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gpg", "gdpo"],
)
def test_advantages_in_chunks_are_those_of_the_whole_batch(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 30, (24,), generator=generator)
    total = int(lengths.sum())
    mask = Jagged.from_lengths(torch.rand(total, generator=generator) < 0.8, lengths)
    mask = mask.with_values(mask.values | (mask.places == 0))
    columns = {
        "response_mask": mask.column(),
        # Rows without a reward, of which the groups have different numbers.
        "token_level_rewards": mask.like(torch.randn(total, generator=generator) * (mask.rows % 5 > 1)),
        "turn_ids": mask.like(mask.places // 4),
        "anchor_ids": mask.like(mask.places // 4 % 2),
        "values": mask.like(torch.randn(total, generator=generator)),
        "reward_component/a": torch.randn(24, generator=generator),
    }
    groups = torch.arange(24) % 6  # the rows of a group do not stand together
    estimator = advantages.get(name)
    config = AlgorithmConfig(gamma=0.9, lam=0.8)
    cut = estimate_advantages(estimator, columns, groups, config, chunk_tokens=150)
    padded = {key: Jagged.of(each).pad() if each.is_nested else each for key, each in columns.items()}
    whole = estimator(
        AdvantageInputs(
            token_level_rewards=padded["token_level_rewards"],
            response_mask=padded["response_mask"],
            group_ids=groups,
            gamma=0.9,
            lam=0.8,
            columns=needs_of(estimator).select(padded),
        )
    )
    for found, expected in zip(cut, (whole.advantages, whole.returns), strict=True):
        torch.testing.assert_close(found.pad(expected.shape[1]), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("chunk_tokens", [60, 1 << 16])
@pytest.mark.parametrize(
    "name",
    ["gae", "gigpo", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gpg", "opo", "grpo_passk"],
)
def test_a_row_without_trained_tokens_has_no_part_in_its_group(name: str, chunk_tokens: int) -> None:
    """What the others get is what they get without it: a failed rollout's score says nothing about its prompt."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 9, (12,), generator=generator)
    failed = torch.zeros(12, dtype=torch.bool)
    failed[[2, 7, 8]] = True
    rows = Jagged.from_lengths(torch.arange(int(lengths.sum())), lengths)
    columns = {
        "response_mask": rows.like(failed.logical_not()[rows.rows]),
        "token_level_rewards": rows.like(torch.randn(len(rows.values), generator=generator)),
        "turn_ids": rows.like(rows.places // 4),
        "anchor_ids": rows.like(rows.places // 4 % 2),
        "values": rows.like(torch.randn(len(rows.values), generator=generator)),
    }
    groups = torch.arange(12) // 4
    estimator, config = advantages.get(name), AlgorithmConfig(gamma=0.9, lam=0.8)
    found = estimate_advantages(estimator, columns, groups, config, chunk_tokens)
    kept = failed.logical_not().nonzero().flatten()
    without = {key: Jagged.of(column).take(kept).column() for key, column in columns.items()}
    expected = estimate_advantages(estimator, without, groups[kept], config, chunk_tokens)
    for whole, part in zip(found, expected, strict=True):
        assert torch.equal(whole.take(kept).values, part.values)
        assert not whole.take(failed.nonzero().flatten()).values.any()


def test_the_interval_of_the_mean_counts_prompts_and_not_rows() -> None:
    uid = torch.tensor([0, 0, 1, 1, 2, 2])
    score = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.5, 0.5])
    bounds = mean_interval(uid, score)
    # Three means 1, 0 and 0.5: a standard deviation of 0.5, so 1.96 * 0.5 / sqrt(3) on either side of 0.5.
    assert bounds == pytest.approx((0.5 - 0.565795, 0.5 + 0.565795), abs=1e-5)
    assert mean_interval(uid + 7, score) == bounds  # numbers of groups may have gaps
    assert mean_interval(torch.zeros(4, dtype=torch.int64), torch.rand(4)) is None
    assert mean_interval(uid[:0], score[:0]) is None
