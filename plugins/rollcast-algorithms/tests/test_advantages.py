"""GRPO and GAE: worked examples, plain-loop references, and laws over random batches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollcast.contracts.algorithm import AdvantageInputs, Needs, needs_of
from rollcast.errors import ColumnError
from rollcast_algorithms.advantages import GRPO_EPSILON, gae, grpo

NAN = float("nan")


def batch(seed: int, rows: int = 7, width: int = 9) -> AdvantageInputs:
    """Random lengths from 0 up, random gaps, groups of any size, NaN under the mask."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, width + 1, (rows, 1), generator=generator)
    mask = (torch.arange(width) < lengths) & (torch.rand(rows, width, generator=generator) < 0.8)
    _, group_ids = torch.randint(0, 4, (rows,), generator=generator).unique(return_inverse=True)  # type: ignore[no-untyped-call]
    return AdvantageInputs(
        token_level_rewards=torch.randn(rows, width, generator=generator).masked_fill(~mask, NAN),
        response_mask=mask.long(),
        group_ids=group_ids,
        columns={"values": torch.randn(rows, width, generator=generator).masked_fill(~mask, NAN)},
        gamma=float(torch.rand((), generator=generator)),
        lam=float(torch.rand((), generator=generator)),
    )


def scored(scores: list[float], groups: list[int], *, by_std: bool = True) -> AdvantageInputs:
    """Two tokens a row, the score on the second."""
    rewards = torch.tensor([[0.0, score] for score in scores])
    return AdvantageInputs(rewards, torch.ones_like(rewards), torch.tensor(groups), norm_adv_by_std_in_grpo=by_std)


def grpo_in_loops(inputs: AdvantageInputs) -> list[list[float]]:
    keep = inputs.response_mask.tolist()
    rewards = inputs.token_level_rewards.tolist()
    scores = [sum(r for r, k in zip(row, kept, strict=True) if k) for row, kept in zip(rewards, keep, strict=True)]
    groups = inputs.group_ids.tolist()
    out = []
    for row, group in enumerate(groups):
        mates = [scores[other] for other in range(len(scores)) if groups[other] == group]
        mean, std = 0.0, 1.0 - GRPO_EPSILON
        if len(mates) > 1:
            mean = sum(mates) / len(mates)
            std = math.sqrt(sum((mate - mean) ** 2 for mate in mates) / (len(mates) - 1))
        value = (scores[row] - mean) / (std + GRPO_EPSILON if inputs.norm_adv_by_std_in_grpo else 1.0)
        out.append([value * kept for kept in keep[row]])
    return out


def gae_in_loops(inputs: AdvantageInputs) -> tuple[list[list[float]], list[list[float]]]:
    """Raw advantages and returns."""
    rewards, values = inputs.token_level_rewards.tolist(), inputs.values.tolist()
    all_advantages, all_returns = [], []
    for row, keep in enumerate(inputs.response_mask.tolist()):
        advantages, returns = [0.0] * len(keep), [0.0] * len(keep)
        next_value = running = 0.0
        for t in reversed(range(len(keep))):
            if not keep[t]:
                continue
            delta = rewards[row][t] + inputs.gamma * next_value - values[row][t]
            running = delta + inputs.gamma * inputs.lam * running
            next_value = values[row][t]
            advantages[t], returns[t] = running, running + values[row][t]
        all_advantages.append(advantages)
        all_returns.append(returns)
    return all_advantages, all_returns


def test_grpo_worked_example() -> None:
    # Group 0: scores 1, 0, mean 1/2, sample std sqrt(1/2). Group 1: 3, 0, 0, mean 1, std sqrt(3).
    out = grpo(scored([1.0, 3.0, 0.0, 0.0, 0.0], [0, 1, 0, 1, 1]))
    half, third = 0.5 / math.sqrt(0.5), 1 / math.sqrt(3)
    expected = torch.tensor([half, 2 * third, -half, -third, -third]).unsqueeze(-1).expand(5, 2)
    torch.testing.assert_close(out.advantages, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.returns, out.advantages)


def test_grpo_without_std_only_centres() -> None:
    out = grpo(scored([1.0, 3.0, 0.0, 0.0, 0.0], [0, 1, 0, 1, 1], by_std=False))
    torch.testing.assert_close(out.advantages[:, 0], torch.tensor([0.5, 2.0, -0.5, -1.0, -1.0]))


@pytest.mark.parametrize("by_std", [True, False])
def test_grpo_gives_a_row_alone_its_score(by_std: bool) -> None:
    out = grpo(scored([2.5, 1.0, 1.0], [1, 0, 0], by_std=by_std))
    assert out.advantages.tolist() == [[2.5, 2.5], [0.0, 0.0], [0.0, 0.0]]


def test_grpo_makes_no_advantage_out_of_rounding() -> None:
    # In float32 the mean of three times 10.1 is not 10.1, and the std is as small as that error.
    out = grpo(scored([10.1, 10.1, 10.1], [0, 0, 0]))
    assert out.advantages.abs().max() < 1e-6


@given(seed=st.integers(0, 10_000), by_std=st.booleans())
@settings(deadline=None)
def test_grpo_agrees_with_loops(seed: int, by_std: bool) -> None:
    inputs = batch(seed)
    inputs = AdvantageInputs(
        inputs.token_level_rewards, inputs.response_mask, inputs.group_ids, norm_adv_by_std_in_grpo=by_std
    )
    torch.testing.assert_close(grpo(inputs).advantages, torch.tensor(grpo_in_loops(inputs)), rtol=1e-4, atol=1e-5)


def gae_inputs(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> AdvantageInputs:
    return AdvantageInputs(rewards, mask, torch.arange(len(mask)), gamma, lam, columns={"values": values})


def test_gae_worked_example() -> None:
    # gamma 1/2, lambda 1/2: deltas are 0 + 2/2 - 1 = 0, 0 + 4/2 - 2 = 0, 8 - 4 = 4;
    # advantages 4/16, 4/4, 4 before whitening; returns add the values.
    inputs = gae_inputs(torch.tensor([[0.0, 0, 8]]), torch.tensor([[1.0, 2, 4]]), torch.ones(1, 3), 0.5, 0.5)
    out = gae(inputs)
    torch.testing.assert_close(out.returns, torch.tensor([[1.25, 3.0, 8.0]]))
    raw = torch.tensor([[0.25, 1.0, 4.0]])
    torch.testing.assert_close(out.advantages, (raw - raw.mean()) / raw.std())


def test_gae_skips_over_the_environments_tokens() -> None:
    dense = gae_inputs(torch.tensor([[0.0, 0, 8]]), torch.tensor([[1.0, 2, 4]]), torch.ones(1, 3), 0.5, 0.5)
    mask = torch.tensor([[1, 0, 0, 1, 1, 0]])
    gapped = gae_inputs(torch.tensor([[0, NAN, 7, 0, 8, 9]]), torch.tensor([[1, 5, NAN, 2, 4, 6]]), mask, 0.5, 0.5)
    expected, out = gae(dense), gae(gapped)
    for name in ("advantages", "returns"):
        assert getattr(out, name)[mask == 0].tolist() == [0, 0, 0]
        torch.testing.assert_close(getattr(out, name)[mask == 1], getattr(expected, name)[0])


@given(seed=st.integers(0, 10_000))
@settings(deadline=None)
def test_gae_agrees_with_loops(seed: int) -> None:
    inputs = batch(seed)
    raw, returns = (torch.tensor(rows) for rows in gae_in_loops(inputs))
    chosen = inputs.response_mask == 1
    if chosen.sum() > 1:
        raw = (raw - raw[chosen].mean()) / (raw[chosen].var() + 1e-8).sqrt() * chosen
    out = gae(inputs)
    torch.testing.assert_close(out.returns, returns, rtol=1e-4, atol=1e-5)
    if chosen.sum() > 1:
        torch.testing.assert_close(out.advantages, raw, rtol=1e-3, atol=1e-4)
    else:
        assert (out.advantages == 0).all()


@pytest.mark.parametrize("width", [0, 1, 2, 3, 8, 33])
def test_gae_with_gamma_and_lambda_one_returns_what_is_to_come(width: int) -> None:
    rewards = torch.randn(4, width)
    out = gae(gae_inputs(rewards, torch.randn(4, width), torch.ones(4, width), 1.0, 1.0))
    torch.testing.assert_close(out.returns, rewards.flip(-1).cumsum(-1).flip(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("estimator", [grpo, gae])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_dtype_gives_float32(estimator: object, dtype: torch.dtype) -> None:
    assert callable(estimator)
    inputs = batch(3)
    other = AdvantageInputs(
        inputs.token_level_rewards.to(dtype),
        inputs.response_mask,
        inputs.group_ids,
        columns={"values": inputs.values.to(dtype)},
    )
    out = estimator(other)
    assert out.advantages.dtype == out.returns.dtype == torch.float32
    assert out.advantages.isfinite().all()


def test_they_say_what_they_need() -> None:
    assert needs_of(grpo) == Needs(compares_samples=True, by_group=True, options=frozenset({"scale_rewards"}))
    assert needs_of(gae) == Needs(frozenset({"values"}), by_group=True, whitens=True, options=frozenset())


def test_they_refuse_what_does_not_fit() -> None:
    ones = torch.ones(2, 3)
    with pytest.raises(ColumnError, match=r"no column 'values'; it has: none\. Declare .* needs=\{'values'\}"):
        gae(AdvantageInputs(ones, ones, torch.arange(2)))
    with pytest.raises(ValueError, match=r"values is \[2, 1\], but the mask is \[2, 3\]"):
        gae(AdvantageInputs(ones, ones, torch.arange(2), columns={"values": torch.ones(2, 1)}))
    with pytest.raises(ValueError, match="token_level_rewards"):
        grpo(AdvantageInputs(torch.ones(2, 4), ones, torch.arange(2)))
    with pytest.raises(ValueError, match=r"group_ids is \[3\], but there are 2 rows"):
        grpo(AdvantageInputs(ones, ones, torch.arange(3)))
