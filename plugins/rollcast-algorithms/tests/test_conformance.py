"""The first-party parts pass the suites that third parties are given, with examples worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from rollcast.contracts.algorithm import (
    AdvantageEstimator,
    AdvantageInputs,
    Denominators,
    PolicyLossInputs,
    advantages,
    kl_penalties,
    loss_aggregations,
    policy_losses,
)
from rollcast_algorithms.kl_controllers import kl_controllers
from rollcast_algorithms.testing import KlControllerSuite
from rollcast_testing import AdvantageSuite, KlPenaltySuite, LossAggregationSuite, PolicyLossSuite


def scored(scores: list[float], groups: list[int], **more: Any) -> AdvantageInputs:
    """Two tokens a row, the score on the second."""
    rewards = torch.tensor([[0.0, score] for score in scores])
    return AdvantageInputs(rewards, torch.ones_like(rewards), torch.tensor(groups), **more)


def rows(*values: float) -> list[list[float]]:
    """Each value at both tokens of its row."""
    return [[value, value] for value in values]


def ratios(ratio: list[float], advantage: list[float], **more: Any) -> PolicyLossInputs:
    """One row, whose old log-probs are -1."""
    old = torch.full((1, len(ratio)), -1.0)
    return PolicyLossInputs(
        old + torch.tensor([ratio]).log(), old, torch.tensor([advantage]), torch.ones(1, len(ratio)), **more
    )


class TestGrpo(AdvantageSuite):
    name = "grpo"
    # Group 0: scores 1, 0, mean 1/2, sample std sqrt(1/2). Group 1: 3, 0, 0, mean 1, std sqrt(3).
    examples = (
        (
            scored([1.0, 3.0, 0.0, 0.0, 0.0], [0, 1, 0, 1, 1]),
            rows(math.sqrt(0.5), 2 / math.sqrt(3), -math.sqrt(0.5), -1 / math.sqrt(3), -1 / math.sqrt(3)),
        ),
        (
            scored([1.0, 3.0, 0.0, 0.0, 0.0], [0, 1, 0, 1, 1], norm_adv_by_std_in_grpo=False),
            rows(0.5, 2.0, -0.5, -1.0, -1.0),
        ),
    )


class TestGrpoOfTheBatch(AdvantageSuite):
    name = "grpo"
    options: ClassVar[Mapping[str, Any]] = {"scale_rewards": "batch"}
    mixes_groups = True
    # Group 0: scores 1, 0, mean 1/2; group 1: 3, 0, mean 3/2; all four have the mean 1 and the sample variance 2.
    examples = (
        (
            scored([1.0, 3.0, 0.0, 0.0], [0, 1, 0, 1], options={"scale_rewards": "batch"}),
            rows(*(value / math.sqrt(2.0) for value in (0.5, 1.5, -0.5, -1.5))),
        ),
        (
            scored(
                [1.0, 3.0, 0.0, 0.0], [0, 1, 0, 1], options={"scale_rewards": "batch"}, norm_adv_by_std_in_grpo=False
            ),
            rows(0.5, 1.5, -0.5, -1.5),
        ),
    )


class TestGrpoPassk(AdvantageSuite):
    name = "grpo_passk"
    # Group 0: 4 leads 1 by 3, the std of 4, 1, 1 is sqrt(3). Group 1: nobody leads. Group 2: one row.
    examples = (
        (scored([1.0, 4.0, 1.0, 2.0, 2.0, 9.0], [0, 0, 0, 1, 1, 2]), rows(0.0, math.sqrt(3), 0.0, 0.0, 0.0, 0.0)),
        (scored([1.0, 4.0, 1.0], [0, 0, 0], norm_adv_by_std_in_grpo=False), rows(0.0, 3.0, 0.0)),
    )


class TestGdpo(AdvantageSuite):
    name = "gdpo"
    mixes_groups = True
    # Both components normalise to ±sqrt(1/2); weights 3 and 1 give ±4·sqrt(1/2), -+2·sqrt(1/2) in
    # group 1. Over the eight tokens that has mean 0 and sample variance 4·(8 + 2)·2/2/7 = 40/7.
    examples = (
        (
            scored(
                [0.0, 0.0, 0.0, 0.0],
                [0, 0, 1, 1],
                columns={
                    "reward_component/right": torch.tensor([1.0, 0.0, 0.0, 5.0]),
                    "reward_component/form": torch.tensor([1.0, 0.0, 10.0, 0.0]),
                },
                options={"gdpo_reward_keys": ["right", "form"], "gdpo_reward_weights": [3.0, 1.0]},
            ),
            rows(*(value * math.sqrt(0.5) / math.sqrt(40 / 7) for value in (4.0, -4.0, -2.0, 2.0))),
        ),
    )


class TestReinforcePlusPlus(AdvantageSuite):
    name = "reinforce_plus_plus"
    mixes_groups = True
    # gamma 1/2: returns 2, 4 and 0, 0, of mean 3/2 and sample variance 11/3.
    examples = (
        (
            scored([4.0, 0.0], [0, 1], gamma=0.5),
            [[0.5 / math.sqrt(11 / 3), 2.5 / math.sqrt(11 / 3)], [-1.5 / math.sqrt(11 / 3)] * 2],
        ),
    )


class TestReinforcePlusPlusBaseline(AdvantageSuite):
    name = "reinforce_plus_plus_baseline"
    mixes_groups = True
    # Centred: 1, -1, 3, -3; over the eight tokens the mean is 0 and the sample variance 40/7.
    examples = (
        (
            scored([2.0, 0.0, 6.0, 0.0], [0, 0, 1, 1]),
            rows(*(value / math.sqrt(40 / 7) for value in (1.0, -1.0, 3.0, -3.0))),
        ),
    )


class TestRemax(AdvantageSuite):
    name = "remax"
    examples = (
        (scored([4.0, 1.0], [0, 1], columns={"reward_baselines": torch.tensor([3.0, 0.5])}), rows(1.0, 0.5)),
        # A reward on the way is no longer to come at the next token.
        (
            AdvantageInputs(
                torch.tensor([[1.0, 0.0, 4.0]]),
                torch.ones(1, 3),
                torch.tensor([0]),
                columns={"reward_baselines": torch.tensor([2.0])},
            ),
            [[3.0, 2.0, 2.0]],
        ),
    )


class TestRloo(AdvantageSuite):
    name = "rloo"
    # Each against the mean of the other two: 6 - 1.5, 3 - 3, 0 - 4.5; alone, its score.
    examples = ((scored([6.0, 3.0, 0.0, 2.0], [0, 0, 0, 1]), rows(4.5, 0.0, -4.5, 2.0)),)


class TestMaxRl(AdvantageSuite):
    name = "maxrl"
    constant_rewards = (0.0, 0.1, 10.1)
    # Means 0.25 and 0; alone, 0.
    examples = (
        (
            scored([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0], [0, 0, 0, 0, 1, 1, 2]),
            rows(*[value / 0.250001 for value in (0.75, -0.25, -0.25, -0.25)], 0.0, 0.0, 0.0),
        ),
    )

    def inputs(self, estimator: AdvantageEstimator, seed: int = 0) -> AdvantageInputs:
        inputs = super().inputs(estimator, seed)
        return replace(inputs, token_level_rewards=inputs.token_level_rewards.abs())


class TestOpo(AdvantageSuite):
    name = "opo"
    # Lengths 3 and 1: baseline (3·4 + 1·0) / 4 = 3.
    examples = (
        (
            AdvantageInputs(
                torch.tensor([[0.0, 0.0, 4.0], [0.0, 0.0, 0.0], [7.0, 0.0, 0.0]]),
                torch.tensor([[1, 1, 1], [1, 0, 0], [1, 0, 0]]),
                torch.tensor([0, 0, 1]),
            ),
            [[1.0, 1.0, 1.0], [-3.0, 0.0, 0.0], [7.0, 0.0, 0.0]],
        ),
    )


class TestGpgEstimator(AdvantageSuite):
    name = "gpg"
    mixes_groups = True
    # Four rows, one with a score: scaled by 4 / 1, and by 1 / f_norm.
    examples = ((scored([2.0, 0.0, 0.0, 0.0], [0, 0, 1, 1], options={"f_norm": 2.0}), rows(2.0, -2.0, 0.0, 0.0)),)


def two_rows() -> AdvantageInputs:
    """Probability 1/2 and Σπ² 1/2 everywhere, so that each token adds 1/2 to its row's weight."""
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    return AdvantageInputs(
        torch.tensor([[0.0, 0.0, 4.0], [0.0, 1.0, 0.0]]),
        mask,
        torch.tensor([0, 0]),
        columns={"old_log_probs": torch.full((2, 3), math.log(0.5)), "sum_pi_squared": torch.full((2, 3), 0.5)},
    )


class TestOptimalTokenBaseline(AdvantageSuite):
    name = "optimal_token_baseline"
    # Equal weights: (4 + 1) / 2 at the first two columns; nobody to compare with at the third.
    examples = ((two_rows(), [[1.5, 1.5, 4.0], [-1.5, -1.5, 0.0]]),)


class TestTirOptimalTokenBaseline(AdvantageSuite):
    name = "tir_optimal_token_baseline"
    examples = ((two_rows(), [[1.5, 1.5, 4.0], [-1.5, -1.5, 0.0]]),)


class TestGae(AdvantageSuite):
    name = "gae"
    mixes_groups = True
    # gamma and lambda 1/2: before whitening 1/4, 1, 4, of mean 7/4 and sample variance 63/16.
    examples = (
        (
            AdvantageInputs(
                torch.tensor([[0.0, 0.0, 8.0]]),
                torch.ones(1, 3),
                torch.tensor([0]),
                gamma=0.5,
                lam=0.5,
                columns={"values": torch.tensor([[1.0, 2.0, 4.0]])},
            ),
            [[-1.5 / math.sqrt(63 / 16), -0.75 / math.sqrt(63 / 16), 2.25 / math.sqrt(63 / 16)]],
        ),
    )


class TestGaeTurn(AdvantageSuite):
    name = "gae_turn"
    mixes_groups = True
    # Turns of two tokens and one, with values 1 and 2: delta 4 - 2 = 2 and 1 + 2/2 - 1 = 1, so 2 and 1 + 2/4 = 3/2;
    # over the three tokens the mean is 5/3 and the sample variance 1/12.
    examples = (
        (
            AdvantageInputs(
                torch.tensor([[0.0, 1.0, 7.0, 4.0]]),
                torch.tensor([[1, 1, 0, 1]]),
                torch.tensor([0]),
                gamma=0.5,
                lam=0.5,
                columns={"values": torch.tensor([[1.0, 9.0, 9.0, 2.0]]), "turn_ids": torch.tensor([[0, 0, 1, 1]])},
            ),
            [[-math.sqrt(12) / 6, -math.sqrt(12) / 6, 0.0, math.sqrt(12) / 3]],
        ),
    )


class TestGigpo(AdvantageSuite):
    name = "gigpo"
    # Scores 3 and 1: A_E is 1 and -1 without std. Both second turns start from state 7, with returns 2 and 1; the
    # first turns from state 5, with 1 + 2/2 = 2 and 0 + 1/2: A_S is 3/4, 1/2, -3/4, -1/2, of weight 2.
    examples = (
        (
            AdvantageInputs(
                torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 1.0]]),
                torch.tensor([[1, 0, 1], [1, 0, 1]]),
                torch.tensor([0, 0]),
                gamma=0.5,
                norm_adv_by_std_in_grpo=False,
                options={"step_advantage_w": 2.0},
                columns={
                    "turn_ids": torch.tensor([[0, 1, 1], [0, 1, 1]]),
                    "anchor_ids": torch.tensor([[5, 0, 7], [5, 0, 7]]),
                },
            ),
            [[2.5, 0.0, 2.0], [-2.5, 0.0, -2.0]],
        ),
    )


class TestVanilla(PolicyLossSuite):
    name = "vanilla"
    # Clip at 1.2 and 0.8, dual clip at 3.
    examples = ((ratios([1.5, 0.5, 1.1, 9.0], [2.0, -2.0, 2.0, -2.0]), [[-2.4, 1.6, -2.2, 6.0]]),)


class TestGspo(PolicyLossSuite):
    name = "gspo"
    # The row's ratio is the geometric mean sqrt(2 · 0.5) = 1; then sqrt(8 · 2) = 4, clipped at 1.2.
    examples = (
        (ratios([2.0, 0.5], [1.0, -3.0]), [[-1.0, 3.0]]),
        (ratios([8.0, 2.0], [1.0, -3.0]), [[-1.2, 12.0]]),
    )


class TestSapo(PolicyLossSuite):
    name = "sapo"
    # tau 2: 2 · sigmoid(2 (ratio - 1)), which is 1 at ratio 1, and 2 · sigmoid(1) at 1.5.
    options = {"tau_pos": 2.0, "tau_neg": 4.0}  # noqa: RUF012
    examples = (
        (
            ratios([1.0, 1.5, 1.0], [3.0, 1.0, -1.0], options={"tau_pos": 2.0, "tau_neg": 4.0}),
            [[-3.0, -2 / (1 + math.exp(-1)), 0.5]],
        ),
    )


class TestGpgLoss(PolicyLossSuite):
    name = "gpg"
    examples = ((ratios([1.0, math.e**-1], [3.0, -2.0]), [[3.0, -4.0]]),)


class TestClipCov(PolicyLossSuite):
    name = "clip_cov"
    options = {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.0, "clip_cov_ub": 10.0}  # noqa: RUF012
    on_policy_gradient = False
    # The mean of A is -1/2, of log π -3/2: covariances 3/4, -1/4, -3/4, 5/4. Between the bounds: the first.
    examples = (
        (
            PolicyLossInputs(
                torch.tensor([[-1.0, -1.0, -2.0, -2.0]]),
                torch.tensor([[-1.0, -1.0, -2.0, -2.0]]),
                torch.tensor([[1.0, -1.0, 1.0, -3.0]]),
                torch.ones(1, 4),
                options={"clip_cov_ratio": 1.0, "clip_cov_lb": 0.3, "clip_cov_ub": 1.0},
            ),
            [[0.0, 1.0, -1.0, 3.0]],
        ),
    )


class TestKlCov(PolicyLossSuite):
    name = "kl_cov"
    options = {"kl_cov_ratio": 0.2}  # noqa: RUF012
    # The covariances are those of the old log-probs, as above: 5/4 is the largest.
    examples = (
        (
            PolicyLossInputs(
                torch.tensor([[-1.0, -1.0, -2.0, -2.0 + math.log(2)]]),
                torch.tensor([[-1.0, -1.0, -2.0, -2.0]]),
                torch.tensor([[1.0, -1.0, 1.0, -3.0]]),
                torch.ones(1, 4),
                options={"kl_cov_ratio": 0.25, "ppo_kl_coef": 0.5},
            ),
            [[-1.0, 1.0, -1.0, 6.0 + 0.5 * math.log(2)]],
        ),
    )


class TestGeoMean(PolicyLossSuite):
    name = "geo_mean"
    on_policy_gradient = False  # each token has the mean of its row's advantages
    # Log-ratios 1 and 0.2 clipped to 0.4 and 0.2, of mean 0.3; A is 2 throughout.
    examples = (
        (
            ratios([math.e, math.e**0.2], [2.0, 2.0], clip_ratio_low=0.4, clip_ratio_high=0.4),
            [[-2 * math.e**0.3, -2 * math.e**0.3]],
        ),
    )


class TestCispo(PolicyLossSuite):
    name = "cispo"
    # log π is -1 + log(ratio); the weight is clipped to [0.8, 1.2].
    examples = ((ratios([1.0, math.e], [2.0, 2.0]), [[2.0, 0.0]]), (ratios([math.e**2], [2.0]), [[-2.4]]))


class TestDro(PolicyLossSuite):
    name = "dro"
    options = {"dro_beta": 0.5}  # noqa: RUF012
    # -(log π · A - 1/4 · d²) with d = 2 and log π = 1.
    examples = ((ratios([1.0, math.e**2], [3.0, 3.0], options={"dro_beta": 0.5}), [[3.0, -2.0]]),)


class TestDppoTv(PolicyLossSuite):
    name = "dppo_tv"
    # Probabilities from 1/e: the ratio 2 changes it by 0.37, the ratio 1.1 by 0.04. Bad and likelier is kept.
    examples = (
        (ratios([2.0, 1.1, 2.0], [1.0, 1.0, -1.0]), [[0.0, 1.1 * (1 - math.log(1.1)), -2.0 * (1 - math.log(2))]]),
    )


class TestDppoKl(PolicyLossSuite):
    name = "dppo_kl"
    # From 1/e to 2/e the binary KL is about 0.29 nats, above 0.2; bad and likelier is kept.
    examples = (
        (ratios([2.0, 1.1, 2.0], [1.0, 1.0, -1.0]), [[0.0, 1.1 * (1 - math.log(1.1)), -2.0 * (1 - math.log(2))]]),
    )


class TestTopr(PolicyLossSuite):
    name = "topr"
    # The response's ratio is 0.5 · 0.5; it weighs on the bad token only.
    examples = ((ratios([0.5, 0.5], [1.0, -1.0]), [[1 + math.log(2), -0.25 * (1 + math.log(2))]]),)


class TestIcepop(PolicyLossSuite):
    name = "icepop"
    on_policy_gradient = True
    # log π is log 2 - 1 within the bounds; the ratio 6 is above 5, and 0.4 below 0.5.
    examples = (
        (
            ratios([2.0, 6.0, 0.4, 1.0], [1.0, 1.0, 1.0, -1.0]),
            [[2.0 * (1.0 - math.log(2.0)), 0.0, 0.0, -1.0]],
        ),
    )


class TestVespo(PolicyLossSuite):
    name = "vespo"
    # w = 2 · 1/2 · 2 = 2 for the row: φ is e^(3 - 6) · 2² where A ≥ 0 and e^(2 - 4) · 2³ elsewhere.
    examples = (
        (
            ratios([2.0, 0.5, 2.0], [1.0, 0.0, -1.0]),
            [
                [
                    4.0 * math.exp(-3.0) * (1.0 - math.log(2.0)),
                    0.0,
                    -8.0 * math.exp(-2.0) * (1.0 - math.log(2.0)),
                ]
            ],
        ),
        # The weights of a rollout correction are a part of w: 2 · 1/2 = 1, where φ is 1.
        (
            replace(ratios([2.0], [1.0]), columns={"rollout_is_weights": torch.tensor([[0.5]])}),
            [[1.0 - math.log(2.0)]],
        ),
    )


class TestK1(KlPenaltySuite):
    name = "k1"
    never_negative = False
    unbiased = True
    examples = ((torch.tensor([[-1.0, -2.0]]), torch.tensor([[-3.0, -1.0]]), torch.tensor([[2.0, -1.0]])),)


class TestAbs(KlPenaltySuite):
    name = "abs"
    examples = ((torch.tensor([[-1.0, -2.0]]), torch.tensor([[-3.0, -1.0]]), torch.tensor([[2.0, 1.0]])),)


class TestK2(KlPenaltySuite):
    name = "k2"
    unbiased_gradient = True
    examples = ((torch.tensor([[-1.0, -2.0]]), torch.tensor([[-3.0, -1.0]]), torch.tensor([[2.0, 0.5]])),)


class TestK3(KlPenaltySuite):
    name = "k3"
    unbiased = True
    # The log-ratios are -2 and 1.
    examples = (
        (torch.tensor([[-1.0, -2.0]]), torch.tensor([[-3.0, -1.0]]), torch.tensor([[math.exp(-2) + 1, math.e - 2]])),
    )


class TestK1Plus(KlPenaltySuite):
    name = "k1+"
    never_negative = False
    unbiased = unbiased_gradient = True


class TestAbsPlus(KlPenaltySuite):
    name = "abs+"
    unbiased_gradient = True


class TestK2Plus(KlPenaltySuite):
    name = "k2+"
    unbiased_gradient = True


class TestK3Plus(KlPenaltySuite):
    name = "k3+"
    unbiased = unbiased_gradient = True


class TestFull(KlPenaltySuite):
    name = "full"
    unbiased = unbiased_gradient = True
    examples = (
        (
            torch.tensor([[[0.5, 0.5], [1.0, 0.0]]]).log(),
            torch.tensor([[[0.25, 0.75], [0.5, 0.5]]]).log(),
            torch.tensor([[0.5 * math.log(4 / 3), math.log(2)]]),
        ),
    )


#: Two rows: losses 1, 3 and 8, the last of the second row masked; at most 4 tokens a row.
AGGREGATED = (
    torch.tensor([[1.0, 3.0], [8.0, 100.0]]),
    torch.tensor([[1, 1], [1, 0]]),
    Denominators(tokens=3.0, sequences=2.0, max_tokens=4.0),
)


class TestTokenMean(LossAggregationSuite):
    name = "token-mean"
    examples = ((*AGGREGATED, 4.0),)


class TestTokenSum(LossAggregationSuite):
    name = "token-sum"
    is_mean = False
    examples = ((*AGGREGATED, 12.0),)


class TestSeqMeanTokenSum(LossAggregationSuite):
    name = "seq-mean-token-sum"
    is_mean = False
    examples = ((*AGGREGATED, 6.0),)


class TestSeqMeanTokenSumNorm(LossAggregationSuite):
    name = "seq-mean-token-sum-norm"
    is_mean = False
    examples = ((*AGGREGATED, 1.5),)


class TestSeqMeanTokenMean(LossAggregationSuite):
    name = "seq-mean-token-mean"
    examples = ((*AGGREGATED, 5.0),)


class TestFixed(KlControllerSuite):
    name = "fixed"


class TestAdaptive(KlControllerSuite):
    name = "adaptive"


@pytest.mark.parametrize(
    ("registry", "suite"),
    [
        (advantages, AdvantageSuite),
        (policy_losses, PolicyLossSuite),
        (kl_penalties, KlPenaltySuite),
        (loss_aggregations, LossAggregationSuite),
        (kl_controllers, KlControllerSuite),
    ],
)
def test_every_part_of_this_distribution_is_tested_here(registry: Any, suite: type) -> None:
    ours = {name for name in registry.names() if registry.find(name).distribution == "rollcast-algorithms"}
    here = [case for case in globals().values() if isinstance(case, type) and issubclass(case, suite)]
    assert {case.name for case in here if case is not suite} == ours
    if suite in (AdvantageSuite, PolicyLossSuite):
        assert all(case.examples for case in here if case is not suite)
