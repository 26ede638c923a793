"""The conformance suite of rewards.

Example, in a plugin's tests::

    from rollcast.contracts.reward import RewardSample
    from rollcast.testing.reward import RewardSuite

    class TestShort(RewardSuite):
        name = "short"
        options = {"limit": 5}
        cases = [
            (RewardSample("2+2=", "4", ground_truth="4"), 1.0),
            (RewardSample("2+2=", "four and more", ground_truth="4"), 0.0),
        ]
"""

from __future__ import annotations

import copy
import math
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from rollcast.contracts.reward import BaseReward, RewardResult, RewardSample, build_reward

__all__ = ["RewardSuite"]


class RewardSuite:
    """What every reward has to do; subclass it, and name the reward and some scores.

    Attributes:
        name: the reward, as it is announced in ``rollcast.rewards``.
        options: its ``reward.reward_kwargs``.
        cases: samples with the score that each has to get.
        max_seconds: the longest that a response of 50,000 to 100,000 characters may take.
    """

    name: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    cases: ClassVar[Sequence[tuple[RewardSample, float]]] = ()
    max_seconds: ClassVar[float] = 10.0

    @pytest.fixture
    def reward(self) -> BaseReward:
        """The reward under test; override it to build one that is not announced."""
        return build_reward(self.name, self.options)

    def test_suite_is_filled_in(self) -> None:
        """There is something to test."""
        assert self.name, f"{type(self).__name__}.name has to name a reward"
        assert self.cases, f"{type(self).__name__}.cases has to hold (sample, score) pairs"

    def test_scores(self, reward: BaseReward) -> None:
        """Each case gets its score."""
        for sample, expected in self.cases:
            score = _score_of(reward.score(sample))
            assert score == pytest.approx(expected), f"{sample} got {score}, expected {expected}"

    def test_no_score_is_above_the_largest(self, reward: BaseReward) -> None:
        """``max_score`` is a finite number, and none of the cases beats it."""
        assert math.isfinite(reward.max_score)
        for sample, _ in self.cases:
            assert _score_of(reward.score(sample)) <= reward.max_score

    def test_is_deterministic(self, reward: BaseReward) -> None:
        """The same sample gets the same score, from this reward and from a second one."""
        second = build_reward(self.name, self.options) if self.name else reward
        for sample, _ in self.cases:
            first = _score_of(reward.score(sample))
            assert _score_of(reward.score(sample)) == first
            assert _score_of(second.score(sample)) == first

    def test_batch_keeps_order(self, reward: BaseReward) -> None:
        """A batch gives each sample's own score, in the order of the samples."""
        samples = [sample for sample, _ in self.cases]
        for batch in (samples, samples[::-1], samples + samples):
            expected = [_score_of(reward.score(sample)) for sample in batch]
            assert [_score_of(value) for value in reward.score_batch(batch)] == pytest.approx(expected)

    def test_empty_batch(self, reward: BaseReward) -> None:
        """No samples, no scores."""
        assert list(reward.score_batch([])) == []

    @pytest.mark.parametrize("finished", [True, False])
    @pytest.mark.parametrize(
        "response",
        ["", " \n\t", "\ufffd\x00", "#" * 50_000, " " * 50_000, "1," * 25_000, "word " * 20_000],
        ids=["empty", "blank", "undecodable", "long-hashes", "long-blanks", "long-digits", "long-text"],
    )
    def test_odd_responses(self, reward: BaseReward, response: str, finished: bool) -> None:
        """A policy writes anything: each response gets a finite score, in reasonable time."""
        for sample, _ in self.cases:
            odd = replace(sample, response=response, finished=finished)
            start = time.perf_counter()
            _score_of(reward.score(odd))
            seconds = time.perf_counter() - start
            assert seconds < self.max_seconds, f"{len(response)} characters took {seconds:.1f} s"

    def test_does_not_change_the_sample(self, reward: BaseReward) -> None:
        """Samples are shared with metrics and trackers."""
        for sample, _ in self.cases:
            before = copy.deepcopy(sample)
            reward.score(sample)
            assert sample == before

    def test_pickles(self, reward: BaseReward) -> None:
        """A reward travels to the workers that score."""
        clone = pickle.loads(pickle.dumps(reward))
        for sample, _ in self.cases:
            assert _score_of(clone.score(sample)) == _score_of(reward.score(sample))


def _score_of(value: float | RewardResult) -> float:
    if isinstance(value, RewardResult):
        assert value.correct is None or isinstance(value.correct, bool), f"correct is {value.correct!r}"
        for name, number in value.extra.items():
            assert math.isfinite(number), f"extra number {name!r} is {number}"
        value = value.score
    assert isinstance(value, int | float), f"a score is a float or a RewardResult, this is {type(value).__name__}"
    assert math.isfinite(value), f"the score is {value}"
    return float(value)
