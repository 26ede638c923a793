"""The estimators beyond GRPO and GAE: plain-loop references over random ragged batches, and odd inputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcast.contracts.algorithm import AdvantageEstimator, AdvantageInputs, Needs, needs_of
from rollcast.errors import ColumnError, ConfigError
from rollcast_algorithms.advantages import (
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    maxrl,
    opo,
    optimal_token_baseline,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    tir_optimal_token_baseline,
)

NAN = float("nan")
Rows = list[list[float]]


def batch(seed: int, *, gaps: bool = True, width: int = 9) -> AdvantageInputs:
    """Seven rows of 0 to 9 tokens in groups of any size; NaN under the mask; group 1 has no rows."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(width) < torch.randint(0, width + 1, (7, 1), generator=generator)
    if gaps:
        mask &= torch.rand(7, width, generator=generator) < 0.8

    def draw() -> torch.Tensor:
        return torch.randn(7, width, generator=generator).masked_fill(~mask, NAN)

    groups = torch.randint(0, 3, (7,), generator=generator)
    return AdvantageInputs(
        token_level_rewards=draw(),
        response_mask=mask.long(),
        group_ids=groups + (groups > 0),
        gamma=float(torch.rand((), generator=generator)),
        columns={
            "old_log_probs": -draw().abs() - 0.1,
            "sum_pi_squared": draw().abs().clamp(max=1.0),
            "reward_baselines": torch.randn(7, generator=generator),
            "rollout_is_weights": draw().abs(),
        },
    )


def scores(inputs: AdvantageInputs) -> list[float]:
    pairs = zip(inputs.token_level_rewards.tolist(), inputs.response_mask.tolist(), strict=True)
    return [sum((r for r, kept in zip(row, keep, strict=True) if kept), 0.0) for row, keep in pairs]


def mates(inputs: AdvantageInputs, row: int) -> list[int]:
    groups = inputs.group_ids.tolist()
    return [other for other in range(len(groups)) if groups[other] == groups[row]]


def spread(inputs: AdvantageInputs, values: list[float]) -> torch.Tensor:
    return torch.tensor(values).unsqueeze(-1) * inputs.response_mask


def centred(inputs: AdvantageInputs) -> list[float]:
    found, all_scores = [], scores(inputs)
    for row, score in enumerate(all_scores):
        group = mates(inputs, row)
        found.append(score if len(group) == 1 else score - sum(all_scores[other] for other in group) / len(group))
    return found


def whitened(inputs: AdvantageInputs, values: torch.Tensor) -> torch.Tensor:
    chosen = inputs.response_mask == 1
    if chosen.sum() < 2:
        return torch.zeros_like(values)
    return torch.where(chosen, (values - values[chosen].mean()) / (values[chosen].var() + 1e-8).sqrt(), 0.0)


def rloo_in_loops(inputs: AdvantageInputs) -> torch.Tensor:
    found, all_scores = [], scores(inputs)
    for row, score in enumerate(all_scores):
        others = [all_scores[other] for other in mates(inputs, row) if other != row]
        found.append(score - sum(others) / len(others) if others else score)
    return spread(inputs, found)


def opo_in_loops(inputs: AdvantageInputs) -> torch.Tensor:
    found, all_scores, lengths = [], scores(inputs), inputs.response_mask.sum(-1).tolist()
    for row, score in enumerate(all_scores):
        group = mates(inputs, row)
        weight = sum(lengths[other] for other in group)
        mean = sum(lengths[other] * all_scores[other] for other in group) / weight if weight else 0.0
        found.append(score if len(group) == 1 else score - mean)
    return spread(inputs, found)


def maxrl_in_loops(inputs: AdvantageInputs) -> torch.Tensor:
    """As in the authors' code, apart from groups of one row, which have no mean there."""
    found, all_scores = [], scores(inputs)
    for row, score in enumerate(all_scores):
        group = mates(inputs, row)
        mean = sum(all_scores[other] for other in group) / len(group)
        found.append(0.0 if len(group) == 1 else (score - mean) / (mean + 1e-6))
    return spread(inputs, found)


def gpg_in_loops(inputs: AdvantageInputs) -> torch.Tensor:
    scored = sum(score != 0 for score in scores(inputs))
    return spread(inputs, [7 / max(scored, 1) * value for value in centred(inputs)])


def passk_in_loops(inputs: AdvantageInputs) -> torch.Tensor:
    found, all_scores = [0.0] * 7, scores(inputs)
    for row in range(7):
        group = sorted(mates(inputs, row), key=lambda other: all_scores[other])
        if len(group) > 1 and group[-1] == row:
            values = torch.tensor([all_scores[other] for other in group])
            found[row] = float((values[-1] - values[-2]) / (values.std() + 1e-6))
    return spread(inputs, found)


def plus_plus_in_loops(inputs: AdvantageInputs) -> torch.Tensor:
    returns = torch.zeros(inputs.response_mask.shape)
    for row, keep in enumerate(inputs.response_mask.tolist()):
        running = 0.0
        for t in reversed(range(len(keep))):
            if keep[t]:
                running = float(inputs.token_level_rewards[row, t]) + inputs.gamma * running
                returns[row, t] = running
    return whitened(inputs, returns)


def remax_in_loops(inputs: AdvantageInputs) -> torch.Tensor:
    found = plus_plus_returns(inputs) - inputs.reward_baselines.unsqueeze(-1)
    return torch.where(inputs.response_mask == 1, found, 0.0)


def plus_plus_returns(inputs: AdvantageInputs) -> torch.Tensor:
    rewards = inputs.token_level_rewards.masked_fill(inputs.response_mask == 0, 0.0)
    return torch.stack([rewards[:, t:].sum(-1) for t in range(rewards.shape[1])], -1)


def baseline_in_loops(inputs: AdvantageInputs, by_count: bool) -> torch.Tensor:
    """The optimal token baseline, token by token; ``by_count`` compares the k-th own tokens."""
    tokens: list[dict[int, tuple[int, float, float]]] = []
    returns = plus_plus_returns(inputs)
    for row, keep in enumerate(inputs.response_mask.tolist()):
        weight, seen = 0.0, {}
        for t in [t for t, kept in enumerate(keep) if kept]:
            norm = 1 - 2 * math.exp(inputs.old_log_probs[row, t]) + float(inputs.sum_pi_squared[row, t])
            weight += max(norm, 0.0) * float(inputs.rollout_is_weights[row, t]) ** 2
            seen[len(seen) if by_count else t] = (t, weight, float(returns[row, t]))
        tokens.append(seen)
    found = torch.zeros(inputs.response_mask.shape)
    for row, seen in enumerate(tokens):
        for place, (t, _, value) in seen.items():
            beside = [tokens[other][place] for other in mates(inputs, row) if place in tokens[other]]
            total = sum(weight for _, weight, _ in beside) + 1e-8
            mean = sum(weight * other for _, weight, other in beside) / total
            found[row, t] = value - (mean if len(beside) > 1 else 0.0)
    return found


@pytest.mark.parametrize(
    ("estimator", "reference"),
    [
        (rloo, rloo_in_loops),
        (opo, opo_in_loops),
        (gpg, gpg_in_loops),
        (grpo_passk, passk_in_loops),
        (reinforce_plus_plus, plus_plus_in_loops),
        (reinforce_plus_plus_baseline, lambda inputs: whitened(inputs, spread(inputs, centred(inputs)))),
        (remax, remax_in_loops),
        (optimal_token_baseline, lambda inputs: baseline_in_loops(inputs, by_count=False)),
        (tir_optimal_token_baseline, lambda inputs: baseline_in_loops(inputs, by_count=True)),
    ],
)
@given(seed=st.integers(0, 10_000))
@settings(deadline=None, max_examples=40)
def test_agrees_with_loops(
    estimator: AdvantageEstimator, reference: Callable[[AdvantageInputs], torch.Tensor], seed: int
) -> None:
    inputs = batch(seed)
    torch.testing.assert_close(estimator(inputs).advantages, reference(inputs), rtol=1e-3, atol=1e-4)


@given(seed=st.integers(0, 10_000))
@settings(deadline=None, max_examples=30)
def test_without_gaps_both_token_baselines_are_the_same(seed: int) -> None:
    inputs = batch(seed, gaps=False)
    torch.testing.assert_close(optimal_token_baseline(inputs).advantages, tir_optimal_token_baseline(inputs).advantages)


def test_gaps_do_not_matter_to_the_multi_turn_baseline() -> None:
    dense = batch(3, gaps=False)
    place = torch.tensor([0, 1, 3, 4, 7, 8, 9, 11, 12])

    def apart(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_zeros(7, 13).index_copy(1, place, tensor)

    columns = {name: apart(dense.column(name)) for name in ("old_log_probs", "sum_pi_squared", "rollout_is_weights")}
    gapped = replace(
        dense,
        token_level_rewards=apart(dense.token_level_rewards),
        response_mask=apart(dense.response_mask),
        columns=columns,
    )
    out = tir_optimal_token_baseline(gapped).advantages[:, place]
    torch.testing.assert_close(out, tir_optimal_token_baseline(dense).advantages)


def test_the_tail_of_the_longest_row_may_be_compared_with_itself() -> None:
    inputs = batch(3, gaps=False)
    inputs = replace(inputs, group_ids=torch.zeros(7).long(), options={"handle_zero_tail": False})
    longest = int(inputs.response_mask.sum(-1).argmax())
    last = int(inputs.response_mask[longest].sum()) - 1
    assert (inputs.response_mask[:, last] == 1).sum() == 1
    assert optimal_token_baseline(inputs).advantages[longest, last] == pytest.approx(0.0, abs=1e-5)
    alone = replace(inputs, group_ids=torch.arange(7))
    out = optimal_token_baseline(alone)
    torch.testing.assert_close(out.advantages, out.returns)


@pytest.mark.parametrize("width", [9, 300])
def test_rewards_on_many_tokens_add_up(width: int) -> None:
    inputs = replace(batch(1, width=width), group_ids=torch.zeros(7).long())
    rewards = inputs.token_level_rewards.masked_fill(inputs.response_mask == 0, 0.0).double().sum(-1)
    expected = (rewards - rewards.mean()).float().unsqueeze(-1) * inputs.response_mask
    torch.testing.assert_close(grpo(replace(inputs, norm_adv_by_std_in_grpo=False)).advantages, expected)


def test_a_wide_batch_makes_no_advantage_out_of_rounding() -> None:
    # The same three rewards at other tokens of each row: in float32 their sum depends on the order.
    rewards = torch.zeros(3, 1000)
    for row, places in enumerate(((0, 500, 999), (999, 0, 500), (41, 40, 42))):
        rewards[row, list(places)] = torch.tensor([0.1, 0.7, 10.3])
    inputs = AdvantageInputs(rewards, torch.ones(3, 1000), torch.zeros(3).long())
    assert grpo(inputs).advantages.abs().max() < 1e-6


@given(seed=st.integers(0, 10_000))
@settings(deadline=None, max_examples=40)
def test_maxrl_agrees_with_loops(seed: int) -> None:
    inputs = batch(seed)
    inputs = replace(inputs, token_level_rewards=inputs.token_level_rewards.abs())
    torch.testing.assert_close(maxrl(inputs).advantages, maxrl_in_loops(inputs), rtol=1e-5, atol=1e-5)


def test_maxrl_s_gradient_is_that_of_the_log_likelihood() -> None:
    """In expectation over n samples of two answers, without all but the first n - 1 terms of its series."""
    logit, samples = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True), 4
    rate = logit.sigmoid()
    total = torch.zeros((), dtype=torch.float64)
    for outcome in itertools.product((0.0, 1.0), repeat=samples):
        reward = torch.tensor(outcome, dtype=torch.float64)
        inputs = AdvantageInputs(reward.unsqueeze(1), torch.ones(samples, 1), torch.zeros(samples).long())
        log_probs = torch.where(reward == 1, rate.log(), (1 - rate).log())
        probability = log_probs.sum().exp().detach()
        total = total + probability * (maxrl(inputs).advantages[:, 0] * log_probs).mean()
    (found,) = torch.autograd.grad(total, logit, retain_graph=True)
    series = -sum((1 - rate) ** k / k for k in range(1, samples))
    (expected,) = torch.autograd.grad(series, logit)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_maxrl_needs_scores_that_are_not_negative() -> None:
    inputs = AdvantageInputs(torch.tensor([[-1.0], [0.5]]), torch.ones(2, 1), torch.zeros(2).long())
    with pytest.raises(ConfigError, match=r"maxrl divides by the mean score .* one is -0\.25"):
        maxrl(inputs)


def test_a_batch_of_some_megabytes_is_treated_like_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # In blocks of 90 rows and a rest.
    monkeypatch.setattr("rollcast_algorithms._rows._BLOCK", 100_000)
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(1100) < torch.randint(1, 1101, (1200, 1), generator=generator)
    rewards = torch.randn(1200, 1100, generator=generator)
    inputs = AdvantageInputs(rewards.masked_fill(~mask, NAN), mask, torch.arange(1200) // 4)
    few = AdvantageInputs(inputs.token_level_rewards[:8], mask[:8], inputs.group_ids[:8])
    for estimator in (rloo, opo, grpo_passk):
        whole, part = estimator(inputs).advantages, estimator(few).advantages
        torch.testing.assert_close(whole[:8], part)
        assert (whole[~mask] == 0).all()
        assert torch.equal(whole, estimator(inputs).advantages)


@pytest.mark.parametrize("estimator", [grpo, rloo, opo])
@pytest.mark.parametrize("value", [NAN, math.inf])
def test_a_score_that_is_not_finite_stays_within_its_group(estimator: AdvantageEstimator, value: float) -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]])
    rewards = torch.tensor([[0.0, value, 5.0], [1.0, NAN, 0.0], [0.0, 0.0, 2.0], [0.0, 4.0, 0.0]])
    out = estimator(AdvantageInputs(rewards, mask, torch.tensor([0, 0, 1, 1]))).advantages
    assert not out[:2][mask[:2] == 1].isfinite().any()
    assert (out[mask == 0] == 0).all()
    torch.testing.assert_close(
        out[2:], estimator(AdvantageInputs(rewards[2:], mask[2:], torch.zeros(2).long())).advantages
    )


@given(seed=st.integers(0, 999))
def test_gdpo_leaves_a_component_out_for_the_rows_that_lack_it(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(12, 2, generator=generator, dtype=torch.float64).float()
    parts[torch.rand(12, 2, generator=generator) < 0.3] = NAN
    columns = {f"reward_component/{name}": parts[:, place] for place, name in enumerate("ab")}
    groups = torch.arange(12) // 4
    inputs = AdvantageInputs(torch.zeros(12, 1), torch.ones(12, 1), groups, columns=columns, whiten=False)
    # As TRL: means and deviations without NaN, which counts as nothing in the sum.
    wide = parts.double().view(3, 4, 2)
    expected = torch.zeros(12, dtype=torch.float64)
    for group in range(3):
        for component in range(2):
            values = wide[group, :, component]
            present = values[~values.isnan()]
            if len(present) > 1:
                normed = (values - present.mean()) / (present.std() + 1e-6)
                expected[4 * group : 4 * group + 4] += normed.nan_to_num(0.0)
    torch.testing.assert_close(gdpo(inputs).advantages[:, 0], expected.float())
    assert bool(gdpo(replace(inputs, whiten=True)).advantages.isfinite().all())


def test_gdpo_says_what_is_wrong_with_its_components() -> None:
    components = {"reward_component/accuracy": torch.ones(7), "reward_component/format": torch.zeros(7)}
    inputs = batch(0).with_columns(components)
    with pytest.raises(ColumnError, match="no column 'reward_component/'"):
        gdpo(batch(0))
    with pytest.raises(ValueError, match="gdpo_reward_keys names style; the reward's components are accuracy, format"):
        gdpo(replace(inputs, options={"gdpo_reward_keys": ["style"]}))
    with pytest.raises(ValueError, match="has 1 weights, but gdpo_reward_keys names 2"):
        gdpo(replace(inputs, options={"gdpo_reward_keys": ["accuracy", "format"], "gdpo_reward_weights": [1.0]}))
    with pytest.raises(ValueError, match="has 2 weights, but gdpo_reward_keys is not set"):
        gdpo(replace(inputs, options={"gdpo_reward_weights": [1.0, 2.0]}))
    with pytest.raises(ValueError, match=r"reward_components\['accuracy'\] is \[6\], but there are 7 rows"):
        gdpo(batch(0).with_columns({"reward_component/accuracy": torch.ones(6)}))


def test_they_say_what_they_need() -> None:
    assert needs_of(remax) == Needs(frozenset({"reward_baselines"}), by_group=True, options=frozenset())
    assert needs_of(gdpo).columns == {"reward_component/"}
    assert needs_of(gdpo).compares_samples
    assert needs_of(optimal_token_baseline).columns == {"old_log_probs", "sum_pi_squared"}
    assert needs_of(optimal_token_baseline).optional == {"rollout_is_weights"}
    assert needs_of(reinforce_plus_plus).columns == frozenset()
    with pytest.raises(ValueError, match=r"reward_baselines is \[3\], but there are 7 rows"):
        remax(batch(0).with_columns({"reward_baselines": torch.zeros(3)}))
