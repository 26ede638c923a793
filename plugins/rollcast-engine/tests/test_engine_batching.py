"""Micro-batch plans."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollcast.contracts.engine import ForwardSettings
from rollcast.errors import ColumnError, ConfigError
from rollcast.protocol import DataProto, Jagged
from rollcast_engine.batching import BatchPlan, check_budget, plan_batch
from rollcast_testing.tiny import jagged_batch, random_batch


def test_a_token_budget_bounds_padded_tokens() -> None:
    batch = random_batch(40, 12, 20, seed=4)
    plan = plan_batch(batch, ForwardSettings(max_token_len_per_gpu=70))
    parts = [plan.micro_batch(index, torch.device("cpu")) for index in range(len(plan))]
    assert max(part.model_inputs["input_ids"].numel() for part in parts) <= 70
    assert sorted(torch.cat([part.rows for part in parts]).tolist()) == list(range(40))
    assert len(parts) <= 16  # 40 rows of 17 tokens on average
    for part in parts:
        ids, mask = part.model_inputs["input_ids"], part.model_inputs["attention_mask"]
        assert mask[:, 0].any()
        assert mask[:, -1].any()
        kept = batch["input_ids"][part.rows][batch["attention_mask"][part.rows] > 0]
        assert torch.equal(ids[mask > 0], kept)
        assert torch.equal(part.columns["prompts"], ids[:, : -part.responses.size(1)])


def _packed_plan(lengths: list[int], budget: int) -> BatchPlan:
    """A plan for rows of so many tokens, at least 2 each: half prompt, half response."""
    width = max(lengths)
    prompts = torch.tensor([length // 2 for length in lengths]).unsqueeze(1)
    counts = torch.tensor(lengths).unsqueeze(1)
    column = torch.arange(2 * width)
    attention = ((column >= width - prompts) & (column < width - prompts + counts)).long()
    columns = {
        "input_ids": attention,
        "attention_mask": attention,
        "position_ids": attention,
        "responses": attention[:, width:],
        "response_mask": attention[:, width:],
    }
    return plan_batch(DataProto.from_dict(columns), ForwardSettings(max_token_len_per_gpu=budget), packs=True)


@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=30),
    budget=st.integers(40, 120),
    more=st.integers(0, 12),
)
def test_packs_are_balanced_within_the_budget(lengths: list[int], budget: int, more: int) -> None:
    plan = _packed_plan(lengths, budget)
    loads = [sum(lengths[row] for row in rows.tolist()) for rows in plan.groups]
    assert plan.longest == max(lengths)
    assert max(loads) <= budget
    assert len(loads) <= 2 * -(-sum(lengths) // budget)  # no two of them would fit into one
    wanted = len(plan) + more
    split = plan.split_to(wanted)
    assert len(split) == min(wanted, len(lengths))
    assert sorted(torch.cat(split.groups).tolist()) == list(range(len(lengths)))
    assert max(sum(lengths[row] for row in rows.tolist()) for rows in split.groups) <= budget


def test_packs_of_a_batch_are_about_equal() -> None:
    lengths = [250, 8, 9, 240, 30, 12, 100, 8, 75, 60, 11, 9]
    plan = _packed_plan(lengths, 300)
    loads = [sum(lengths[row] for row in rows.tolist()) for rows in plan.groups]
    assert len(loads) == 3
    assert max(loads) - min(loads) <= 10


def test_packs_by_rows_mix_long_and_short() -> None:
    batch = random_batch(11, 12, 20, seed=4)
    settings = ForwardSettings(micro_batch_size_per_gpu=4)
    packed, padded = (plan_batch(batch, settings, packs=packs) for packs in (True, False))
    for plan in (packed, padded):
        assert sorted(torch.cat(plan.groups).tolist()) == list(range(11))
        assert max(map(len, plan.groups)) <= 4
    assert packed.split_to(9) is packed
    lengths = batch["attention_mask"].sum(1)
    spread = [
        max(loads) - min(loads)
        for loads in ([int(lengths[rows].sum()) for rows in p.groups[:2]] for p in (packed, padded))
    ]
    assert spread[0] < spread[1]


def test_ranks_that_share_rows_have_their_budgets_together() -> None:
    batch = random_batch(6, 12, 20, seed=4)
    settings = ForwardSettings(max_token_len_per_gpu=16)
    plan = plan_batch(batch, settings, packs=True, sequence_ranks=2)
    lengths = batch["attention_mask"].sum(1)
    assert max(int(lengths[rows].sum()) for rows in plan.groups) in range(17, 33)
    check_budget(plan.longest, settings, 2)
    with pytest.raises(ConfigError, match="32 tokens does not fit max_token_len_per_gpu=16; raise it to at least 32"):
        check_budget(plan.longest, settings)
    with pytest.raises(ConfigError, match="=15 on 2 ranks; raise it to at least 16"):
        check_budget(plan.longest, ForwardSettings(max_token_len_per_gpu=15), 2)


@pytest.mark.parametrize("packs", [True, False])
def test_a_jagged_batch_is_cut_and_padded_like_a_padded_one(packs: bool) -> None:
    padded = random_batch(11, 12, 20, seed=4)
    advantages = torch.rand(11, 20) * (padded["attention_mask"][:, 12:] != 0)
    present = padded["attention_mask"][:, 12:]
    padded = padded.with_columns({"advantages": advantages, "weight": torch.arange(11.0)})
    jagged = jagged_batch(padded).with_columns({"advantages": Jagged.from_padded(advantages, present)})
    plans = [plan_batch(each, ForwardSettings(max_token_len_per_gpu=70), packs) for each in (padded, jagged)]
    assert len(plans[0]) == len(plans[1]) > 1
    assert plans[0].source.counts() == plans[1].source.counts()
    outputs = [plan.source.empty_outputs(["values"]) for plan in plans]
    for index in range(len(plans[0])):
        ours, theirs = (plan.micro_batch(index, torch.device("cpu")) for plan in plans)
        assert torch.equal(ours.rows, theirs.rows)
        assert torch.equal(ours.response_mask, theirs.response_mask)
        for name in ("input_ids", "attention_mask", "prompts", "responses", "advantages", "weight"):
            assert torch.equal(ours.columns[name], theirs.columns[name]), name
        present_positions = ours.model_inputs["attention_mask"] > 0
        positions = [each.model_inputs["position_ids"][present_positions] for each in (ours, theirs)]
        assert torch.equal(*positions)
        for micro, output in zip((ours, theirs), outputs, strict=True):
            micro.scatter(micro.columns["advantages"] + 1, output["values"])
    dense, flat = (plan.source.as_batch(output)["values"] for plan, output in zip(plans, outputs, strict=True))
    assert torch.equal(dense, Jagged.of(flat).pad(20))


def test_a_jagged_batch_needs_a_mask_of_its_responses() -> None:
    batch = jagged_batch(random_batch(3, 4, 5))
    with pytest.raises(ColumnError, match="response_mask"):
        plan_batch(batch.drop("response_mask"), ForwardSettings())
    with pytest.raises(ColumnError, match="not as long"):
        plan_batch(batch.with_columns({"response_mask": batch["prompts"]}), ForwardSettings())
