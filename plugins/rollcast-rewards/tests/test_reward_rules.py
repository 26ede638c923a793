from __future__ import annotations

import pytest

from rollcast.contracts.reward import RewardSample
from rollcast.errors import RewardError
from rollcast_rewards.rules import exact_match, gsm8k
from rollcast_testing.reward import RewardSuite


class TestExactMatch(RewardSuite):
    name = "exact_match"
    cases = (
        (RewardSample("2+2=", "4", ground_truth="4"), 1.0),
        (RewardSample("2+2=", " 4\n", ground_truth=4), 1.0),
        (RewardSample("2+2=", "4", ground_truth="4", finished=False), 0.0),
        (RewardSample("2+2=", "4.", ground_truth="4"), 0.0),
        (RewardSample("2+2=", "", ground_truth="4"), 0.0),
    )


def answer(response: str, truth: object = "1080", score: float = 1.0) -> tuple[RewardSample, float]:
    return RewardSample("600*1.8?", response, ground_truth=truth), score


class TestGsm8k(RewardSuite):
    name = "gsm8k"
    cases = (
        answer("600*1.8 = 1080\n#### 1080"),
        answer("#### 1,080"),
        answer("####$1,080."),
        answer("#### 1080.00 dollars"),
        answer("#### 3 no:\n#### 1080"),
        answer("#### 1080", "1,080"),
        answer("#### 1080 and then some more text 7", 1080),
        answer("#### -$5", "-5"),
        answer("#### -5", "-5"),
        answer("#### .5", "0.5"),
        answer("#### 1080\n#### 3", score=0.0),
        answer("the answer is 1080", score=0.0),
        answer("#### the answer is 1080", score=0.0),
        answer("### 1080", score=0.0),
        answer("#### -1080", score=0.0),
        answer("#### 108", score=0.0),
        answer("#### ,", score=0.0),
    )


def test_an_unfinished_answer_counts_in_gsm8k_only() -> None:
    sample = RewardSample("?", "#### 1", ground_truth="1", finished=False)
    assert gsm8k(sample) == 1.0
    assert exact_match(sample) == 0.0


def test_ground_truths_that_cannot_be_compared_with() -> None:
    with pytest.raises(RewardError, match="needs a ground truth"):
        exact_match(RewardSample("?", "4"))
    with pytest.raises(RewardError, match="needs a number as ground truth, this is 'four'"):
        gsm8k(RewardSample("?", "4", ground_truth="four"))
