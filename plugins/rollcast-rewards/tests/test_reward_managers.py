from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rollcast.contracts.reward import BaseReward, RewardResult, RewardSample
from rollcast.errors import RewardError
from rollcast_rewards.managers import NaiveRewardManager

SAMPLES = [
    RewardSample(f"prompt {n}", f"response {n} " + "long " * 200, ground_truth=n, data_source="s") for n in range(3)
]


class Scripted(BaseReward):
    name = "scripted"

    def __init__(self, give: Callable[[RewardSample], Any]) -> None:
        self.give = give

    def score(self, sample: RewardSample) -> Any:
        return self.give(sample)


class Batched(BaseReward):
    def __init__(self, give: Callable[[Sequence[RewardSample]], Any]) -> None:
        self.give = give

    def score(self, sample: RewardSample) -> float:
        raise NotImplementedError

    def score_batch(self, samples: Sequence[RewardSample]) -> Any:
        return self.give(samples)


def fail_on_one(sample: RewardSample) -> float:
    return float(1 / (sample.ground_truth - 1))


@pytest.mark.parametrize(
    "value", [1, 1.0, True, np.float32(1), np.bool_(True), np.ones(()), torch.tensor(1.0), RewardResult(1)]
)
def test_anything_that_is_one_number_is_a_score(value: Any) -> None:
    results = NaiveRewardManager(Scripted(lambda sample: value))(SAMPLES)
    assert results == [RewardResult(1.0)] * 3
    assert all(type(result.score) is float for result in results)


def test_order_extras_and_batches() -> None:
    reward = Scripted(lambda sample: RewardResult(sample.ground_truth, True, {"n": sample.ground_truth}))
    results = NaiveRewardManager(reward)(SAMPLES)
    assert results == [RewardResult(float(n), True, {"n": float(n)}) for n in range(3)]
    assert NaiveRewardManager(reward)([]) == []
    batched = Batched(lambda samples: np.array([sample.ground_truth for sample in samples]))
    assert [result.score for result in NaiveRewardManager(batched)(SAMPLES)] == [0.0, 1.0, 2.0]


def test_a_reward_that_raises_is_named_with_its_sample() -> None:
    with pytest.raises(RewardError) as caught:
        NaiveRewardManager(Scripted(fail_on_one))(SAMPLES)
    message = str(caught.value)
    assert message.startswith("reward scripted failed: ZeroDivisionError: division by zero\n")
    for part in ("sample 1 of 3, data source 's'", "prompt: 'prompt 1'", "response: 'response 1 long", "truth: '1'"):
        assert part in message
    assert len(message) < 600
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == message


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (float("nan"), "score = nan, which is not finite"),
        (np.inf, "score = inf, which is not finite"),
        ("1", r"score = '1', which is not a number \(str\)"),
        (None, r"score = None, which is not a number \(NoneType\)"),
        ([1.0], r"score = \[1\.0\], which is not a number \(list\)"),
        (np.ones(2), r"score = .*, which is not a number \(ndarray\)"),
        (torch.ones(2), r"score = .*, which is not a number \(Tensor\)"),
        (RewardResult(1.0, extra={"level": float("nan")}), "level = nan, which is not finite"),
        (RewardResult(1.0, extra={"level": "high"}), "level = 'high', which is not a number"),  # type: ignore[dict-item]
    ],
)
def test_scores_that_are_no_finite_number(value: Any, complaint: str) -> None:
    reward = Scripted(lambda sample: value if sample.ground_truth == 2 else 0.0)
    with pytest.raises(RewardError, match=rf"(?s)reward scripted gave {complaint}.*sample 2 of 3"):
        NaiveRewardManager(reward)(SAMPLES)


def test_batches_that_go_wrong() -> None:
    with pytest.raises(RewardError, match="reward Batched: 3 samples were given, 2 scores came back"):
        NaiveRewardManager(Batched(lambda samples: [0.0, 0.0]))(SAMPLES)
    with pytest.raises(RewardError, match=r"(?s)reward Batched failed: ZeroDivisionError.*sample 0 of 3"):
        NaiveRewardManager(Batched(lambda samples: 1 / 0))(SAMPLES)
    with pytest.raises(RewardError, match="reward Batched failed: TypeError"):
        NaiveRewardManager(Batched(lambda samples: None))(SAMPLES)
