"""Estimators over turns against references that go through turns one by one."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch

from rollcast.contracts.algorithm import AdvantageInputs, AdvantageOutputs
from rollcast.errors import ColumnError
from rollcast_algorithms import gae_turn, gigpo, grpo

Turn = list[int]


def draw(seed: int, rows: int = 8, **more: Any) -> AdvantageInputs:
    """Rows of up to five turns with a tool's tokens between and within them, three anchors a group."""
    generator = torch.Generator().manual_seed(seed)
    width = 24
    lengths = torch.randint(0, width + 1, (rows, 1), generator=generator)
    mask = (torch.arange(width) < lengths) & (torch.rand(rows, width, generator=generator) < 0.6)
    turn_ids = (torch.rand(rows, width, generator=generator) < 0.2).cumsum(-1).int()
    anchor_of = torch.randint(0, 3, (rows, width + 1), generator=generator)
    return AdvantageInputs(
        token_level_rewards=torch.randn(rows, width, generator=generator),
        response_mask=mask,
        group_ids=torch.arange(rows) // 4,
        columns={
            "turn_ids": turn_ids,
            "values": torch.randn(rows, width, generator=generator),
            "anchor_ids": anchor_of.gather(1, turn_ids.long()),
        },
        **more,
    )


def turns_of(inputs: AdvantageInputs, row: int) -> list[Turn]:
    """Places of each turn's tokens."""
    found: dict[int, Turn] = {}
    for place in inputs.response_mask[row].nonzero().flatten().tolist():
        found.setdefault(int(inputs.column("turn_ids")[row, place]), []).append(place)
    return list(found.values())


def reward_of(inputs: AdvantageInputs, row: int, turn: Turn) -> float:
    return sum(float(inputs.token_level_rewards[row, place]) for place in turn)


@pytest.mark.parametrize("seed", range(4))
def test_gae_goes_from_turn_to_turn(seed: int) -> None:
    inputs = draw(seed, gamma=0.9, lam=0.8, whiten=False)
    advantages, returns = torch.zeros(8, 24), torch.zeros(8, 24)
    for row in range(8):
        following = ahead = 0.0
        for turn in reversed(turns_of(inputs, row)):
            value = float(inputs.values[row, turn[0]])
            following = reward_of(inputs, row, turn) + 0.9 * ahead - value + 0.9 * 0.8 * following
            ahead = value
            advantages[row, turn], returns[row, turn] = following, following + value
    found = gae_turn(inputs)
    torch.testing.assert_close(found.advantages, advantages, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.returns, returns, rtol=1e-6, atol=1e-6)
    whitened = gae_turn(draw(seed, gamma=0.9, lam=0.8)).advantages[inputs.response_mask]
    chosen = advantages[inputs.response_mask].double()
    expected = (chosen - chosen.mean()) / (chosen.var() + 1e-8).sqrt()
    torch.testing.assert_close(whitened.double(), expected, rtol=1e-5, atol=1e-6)


def normalise(value: float, group: list[float], by_std: bool) -> float:
    centred = value - statistics.fmean(group)
    return centred / (statistics.stdev(group) + 1e-6) if by_std and len(group) > 1 else centred


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_gigpo_compares_rollouts_and_turns_from_one_state(seed: int, by_std: bool) -> None:
    inputs = draw(seed, gamma=0.9, norm_adv_by_std_in_grpo=by_std, options={"step_advantage_w": 0.7})
    turns = [turns_of(inputs, row) for row in range(8)]
    scores = [sum(reward_of(inputs, row, turn) for turn in turns[row]) for row in range(8)]
    steps: list[tuple[int, Turn, int, float]] = []
    for row in range(8):
        ahead = 0.0
        for turn in reversed(turns[row]):
            ahead = reward_of(inputs, row, turn) + 0.9 * ahead
            steps.append((row, turn, int(inputs.column("anchor_ids")[row, turn[0]]), ahead))
    expected = torch.zeros(8, 24)
    for row, turn, anchor, value in steps:
        peers = [other[3] for other in steps if other[0] // 4 == row // 4 and other[2] == anchor]
        group = scores[row // 4 * 4 : row // 4 * 4 + 4]
        expected[row, turn] = normalise(scores[row], group, by_std) + 0.7 * normalise(value, peers, by_std)
    assert len(steps) > 8 * 2
    found = gigpo(inputs)
    torch.testing.assert_close(found.advantages, expected, rtol=1e-5, atol=1e-5)


def test_gigpo_is_grpo_where_no_state_repeats() -> None:
    inputs = draw(1)
    different = inputs.with_columns({"anchor_ids": torch.arange(8 * 24).view(8, 24)})
    torch.testing.assert_close(gigpo(different).advantages, grpo(different).advantages)
    assert not torch.allclose(gigpo(inputs).advantages, grpo(inputs).advantages)


@pytest.mark.parametrize("name", ["turn_ids", "anchor_ids"])
def test_columns_of_another_shape_are_refused(name: str) -> None:
    inputs = draw(0)
    with pytest.raises(ValueError, match=f"{name} is \\[8, 3\\], but the mask is \\[8, 24\\]"):
        gigpo(inputs.with_columns({name: torch.zeros(8, 3, dtype=torch.int64)}))


def test_a_batch_without_turns_is_refused() -> None:
    inputs = draw(0)
    bare = AdvantageInputs(inputs.token_level_rewards, inputs.response_mask, inputs.group_ids)
    with pytest.raises(ColumnError, match="turn_ids"):
        gigpo(bare.with_columns({"anchor_ids": inputs.column("anchor_ids")}))


def test_outcome_only_estimators_sum_the_rewards_of_all_turns() -> None:
    inputs = draw(2)
    scores = torch.where(inputs.response_mask, inputs.token_level_rewards, 0.0).sum(-1)
    at_end = torch.zeros_like(inputs.token_level_rewards)
    for row in range(8):
        places = inputs.response_mask[row].nonzero().flatten()
        if len(places):
            at_end[row, places[-1]] = scores[row]
    whole = AdvantageInputs(at_end, inputs.response_mask, inputs.group_ids)
    found: AdvantageOutputs = grpo(inputs)
    torch.testing.assert_close(found.advantages, grpo(whole).advantages, rtol=1e-5, atol=1e-6)
