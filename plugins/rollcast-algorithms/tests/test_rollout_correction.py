"""Importance weights, rejection, veto and bypass: worked numbers and laws."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollcast.protocol import Jagged
from rollcast_algorithms import RolloutCorrection, RolloutCorrectionConfig, correct_rollout, may_bypass, measure_gap

NAN = float("nan")
LEVELS = ["token", "seq_sum", "seq_mean", "seq_max"]
ESTIMATES = ["k1", "k2", "k3"]


def rows(padded: Tensor) -> Jagged:
    """Rows of one length, of which the mask chooses."""
    return Jagged.from_padded(padded, torch.ones_like(padded))


def correct(ratios: list[list[float]], mask: list[list[int]] | None = None, **keys: Any) -> RolloutCorrection:
    """The rollout's log-probs are -1, the trainer's differ by these ratios."""
    rollout = torch.full((len(ratios), len(ratios[0])), -1.0)
    given = torch.ones_like(rollout).long() if mask is None else torch.tensor(mask)
    old = rollout + torch.tensor(ratios).log()
    return correct_rollout(rows(old), rows(rollout), rows(given), RolloutCorrectionConfig(**keys))


def weights(ratios: list[list[float]], mask: list[list[int]] | None = None, **keys: Any) -> list[list[float]]:
    found = correct(ratios, mask, **keys).weights
    assert found is not None
    return [[round(value, 5) for value in row] for row in found.pad().tolist()]


RATIOS = [[1.0, 4.0, 0.25], [0.5, 0.5, 1.0]]


def test_nothing_is_done_unless_it_is_asked_for() -> None:
    out = correct(RATIOS, [[1, 1, 0], [1, 0, 0]])
    assert out.weights is None
    assert out.response_mask.pad().tolist() == [[1, 1, 0], [1, 0, 0]]
    assert out.metrics["rollout_corr/kl"] == pytest.approx((0 - math.log(4) + math.log(2)) / 3)


def test_truncation_by_token_and_by_sequence() -> None:
    assert weights(RATIOS, rollout_is="token") == [[1.0, 2.0, 0.25], [0.5, 0.5, 1.0]]
    assert weights(RATIOS, rollout_is="sequence") == [[1.0] * 3, [0.25] * 3]
    assert weights([[4.0, 2.0]], rollout_is="sequence", rollout_is_threshold=5) == [[5.0, 5.0]]


@pytest.mark.parametrize("threshold", ["0.4_2.0", [0.4, 2.0]])
def test_icepop_is_zero_outside_its_bounds(threshold: object) -> None:
    assert weights(RATIOS, rollout_is="token", rollout_is_threshold=threshold) == [[1.0, 0.0, 0.0], [0.5, 0.5, 1.0]]
    assert weights(RATIOS, rollout_is="sequence", rollout_is_threshold=threshold) == [[1.0] * 3, [0.0] * 3]


def test_normalised_weights_have_mean_one() -> None:
    mask = [[1, 1, 1], [1, 1, 0]]
    by_token = weights(RATIOS, mask, rollout_is="token", rollout_is_batch_normalize=True)
    assert sum(map(sum, by_token)) / 5 == pytest.approx(1.0, abs=1e-4)
    # At the level of sequences each row counts once: weights 1 and 1/4, whatever their lengths.
    assert weights(RATIOS, mask, rollout_is="sequence", rollout_is_batch_normalize=True) == [
        [1.6] * 3,
        [0.4, 0.4, 0.0],
    ]


def mask_of(rules: str, threshold: object, mask: list[list[int]] | None = None) -> list[list[int]]:
    kept = correct(RATIOS, mask, rollout_rs=rules, rollout_rs_threshold=threshold).response_mask
    found: list[list[int]] = kept.pad().tolist()
    return found


@pytest.mark.parametrize(
    ("rules", "threshold", "expected"),
    [
        # k1 is log(μ / π): 0, -log 4, log 4 and log 2, log 2, 0.
        ("token_k1", "3.0", [[1, 0, 0], [1, 1, 1]]),
        ("token_k1", "0.2_1.5", [[1, 1, 0], [0, 0, 1]]),
        ("seq_sum_k1", "0.5_3.0", [[1, 1, 1], [0, 0, 0]]),
        ("seq_mean_k1", "0.5_1.5", [[1, 1, 1], [0, 0, 0]]),
        ("seq_max_k1", "0.5_3.0", [[0, 0, 0], [1, 1, 1]]),
        # k2 is log(4)² / 2 = 0.96 twice, and log(2)² / 2 = 0.24 twice.
        ("token_k2", 0.5, [[1, 0, 0], [1, 1, 1]]),
        ("seq_sum_k2", 0.5, [[0, 0, 0], [1, 1, 1]]),
        ("seq_mean_k2", 0.2, [[0, 0, 0], [1, 1, 1]]),
        ("seq_max_k2", 0.2, [[0, 0, 0], [0, 0, 0]]),
        # k3 is 4 - 1 - log 4 = 1.61, 1/4 - 1 + log 4 = 0.64, and 1/2 - 1 + log 2 = 0.19.
        ("token_k3", 1.0, [[1, 0, 1], [1, 1, 1]]),
        ("seq_max_k3", 1.0, [[0, 0, 0], [1, 1, 1]]),
        ("token_k3, seq_mean_k1", "1.0,0.9_1.5", [[1, 0, 1], [0, 0, 0]]),
    ],
)
def test_rejection(rules: str, threshold: object, expected: list[list[int]]) -> None:
    assert mask_of(rules, threshold) == expected


def test_a_veto_takes_the_whole_row() -> None:
    out = correct(RATIOS, rollout_token_veto_threshold=0.3)
    assert out.response_mask.pad().tolist() == [[0, 0, 0], [1, 1, 1]]
    assert out.metrics["rollout_corr/rollout_veto_fraction"] == 0.5
    hidden = correct(RATIOS, [[1, 1, 0], [1, 1, 1]], rollout_token_veto_threshold=0.3)
    assert hidden.response_mask.pad().tolist() == [[1, 1, 0], [1, 1, 1]]


def ragged(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(7) < torch.randint(0, 8, (6, 1), generator=generator)
    rollout = -torch.rand(6, 7, generator=generator)
    return rollout + 0.4 * torch.randn(6, 7, generator=generator), rollout, mask.long()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("estimate", ESTIMATES)
@given(seed=st.integers(0, 10_000), threshold=st.floats(1.01, 3))
@settings(deadline=None, max_examples=15)
def test_masked_tokens_and_padding_mean_nothing(level: str, estimate: str, seed: int, threshold: float) -> None:
    old, rollout, mask = ragged(seed)
    config = RolloutCorrectionConfig(
        rollout_is="sequence",
        rollout_is_batch_normalize=True,
        rollout_rs=f"{level}_{estimate}",
        rollout_rs_threshold=threshold if estimate == "k1" else threshold - 1,
        rollout_token_veto_threshold=0.3,
    )
    expected = correct_rollout(rows(old), rows(rollout), rows(mask), config)
    assert expected.weights is not None
    hidden = mask == 0
    dirty = correct_rollout(
        rows(old.masked_fill(hidden, NAN)), rows(rollout.masked_fill(hidden, -math.inf)), rows(mask), config
    )
    bare = correct_rollout(*(Jagged.from_padded(each, mask) for each in (old, rollout, mask)), config)
    for other, places in ((dirty, torch.ones_like(mask)), (bare, mask)):
        assert other.response_mask.values.tolist() == expected.response_mask.pad()[places != 0].tolist()
        assert other.weights is not None
        torch.testing.assert_close(other.weights.values, expected.weights.pad()[places != 0])
        assert other.metrics == pytest.approx(dict(expected.metrics))
    assert (expected.response_mask.pad() <= mask).all()
    assert all(math.isfinite(value) for value in expected.metrics.values())


@pytest.mark.parametrize("width", [0, 3])
def test_no_tokens_at_all(width: int) -> None:
    config = RolloutCorrectionConfig(rollout_is="sequence", rollout_rs="seq_max_k3", rollout_rs_threshold=0.1)
    config = dataclasses.replace(config, rollout_is_batch_normalize=True)
    nothing = rows(torch.zeros(2, width))
    out = correct_rollout(nothing, nothing, nothing, config)
    assert out.weights is not None
    assert out.weights.values.sum() == out.response_mask.values.sum() == 0
    assert all(math.isfinite(value) for value in out.metrics.values())


def test_the_same_policies_give_weights_of_one_and_no_gap() -> None:
    old, _, mask = (rows(each) for each in ragged(1))
    out = correct_rollout(
        old, old, mask, RolloutCorrectionConfig(rollout_is="token", rollout_rs="token_k3", rollout_rs_threshold=1e-6)
    )
    assert out.weights is not None
    torch.testing.assert_close(out.weights.values, mask.values.float())
    assert out.response_mask.values.tolist() == mask.values.tolist()
    assert out.metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1.0)
    assert set(measure_gap(old, old, mask).values()) == {0.0}


def test_columns_of_other_tokens_are_refused() -> None:
    short, whole = rows(torch.zeros(2, 2)), rows(torch.ones(2, 3))
    with pytest.raises(ValueError, match="rollout_log_probs has 4 tokens, but the mask has 6"):
        measure_gap(whole, short, whole)


def test_extreme_gaps_stay_finite() -> None:
    out = correct([[1e30, 1e-30], [1.0, 1.0]], rollout_is="sequence", rollout_is_threshold=1e9)
    assert all(math.isfinite(value) for value in out.metrics.values())
    assert out.weights is not None
    assert out.weights.values.isfinite().all()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rollout_is": "row"}, "rollout_is is 'row'; valid: token, sequence"),
        (
            {"rollout_is": "token", "rollout_is_threshold": -1},
            "rollout_is_threshold is -1; it must be a number above 0",
        ),
        ({"rollout_is": "token", "rollout_is_threshold": "2_1"}, "or two in order, such as 0.5_2.0"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 1}, "names 'token_k4'; valid: token_k1"),
        ({"rollout_rs": "token_k3"}, "give one threshold for all rules, or one for each"),
        (
            {"rollout_rs": "token_k3", "rollout_rs_threshold": "1,2"},
            "give one threshold for all rules, or one for each",
        ),
        ({"rollout_rs": "token_k3", "rollout_rs_threshold": "0.5_2"}, "a rule with k3 takes one number"),
        ({"rollout_token_veto_threshold": 0.0}, "must be greater than 0, got 0"),
    ],
)
def test_what_means_nothing_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        correct(RATIOS, **keys)


def test_bypass() -> None:
    never, always = RolloutCorrectionConfig(), RolloutCorrectionConfig(bypass_mode=True)
    assert not may_bypass(never, 0.0, 1)
    assert may_bypass(always, None, 1)
    careful = RolloutCorrectionConfig(bypass_mode=True, bypass_max_kl=0.01, bypass_check_freq=3)
    assert not may_bypass(careful, None, 1)  # nothing measured yet
    assert [may_bypass(careful, 0.005, steps) for steps in (1, 2, 3)] == [True, True, False]
    assert not may_bypass(careful, 0.02, 1)
