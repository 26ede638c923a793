"""The conformance suites of rewards and of reward managers.

Example, in a plugin's tests::

    from rollcast.contracts.reward import RewardSample
    from rollcast_testing.reward import RewardSuite

    class TestShort(RewardSuite):
        name = "short"
        options = {"limit": 5}
        cases = [
            (RewardSample("2+2=", "4", ground_truth="4"), 1.0),
            (RewardSample("2+2=", "four and more", ground_truth="4"), 0.0),
        ]

    class TestPatient(RewardManagerSuite):
        name = "patient"
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import os
import pickle
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from rollcast.contracts.reward import (
    BaseReward,
    BaseRewardManager,
    RewardResult,
    RewardSample,
    RewardSettings,
    RewardValue,
    build_reward,
    build_reward_manager,
)
from rollcast.errors import RewardError

__all__ = ["RewardManagerSuite", "RewardSuite"]


class RewardSuite:
    """Conformance tests of one reward; subclass it and set the name and some expected scores.

    Attributes:
        name: name of the reward in ``rollcast.rewards``.
        options: keys of ``reward.reward_kwargs``.
        cases: pairs of sample and expected score.
        max_seconds: time limit in seconds for a response of 50,000 to 100,000 characters.
    """

    name: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    cases: ClassVar[Sequence[tuple[RewardSample, float]]] = ()
    max_seconds: ClassVar[float] = 10.0

    @pytest.fixture
    def reward(self) -> BaseReward:
        """Build the reward under test; override it for one that is not registered."""
        return build_reward(self.name, self.options)

    def test_suite_is_filled_in(self) -> None:
        """Check that the suite names a reward and has cases."""
        assert self.name, f"{type(self).__name__}.name has to name a reward"
        assert self.cases, f"{type(self).__name__}.cases has to hold (sample, score) pairs"

    def test_scores(self, reward: BaseReward) -> None:
        """Check that each case gets its expected score."""
        for sample, expected in self.cases:
            score = _score_of(reward.score(sample), len(sample.response_ids))
            assert score == pytest.approx(expected), f"{sample} got {score}, expected {expected}"

    def test_no_score_is_above_the_largest(self, reward: BaseReward) -> None:
        """Check that ``max_score`` is finite and that no case exceeds it."""
        assert math.isfinite(reward.max_score)
        for sample, _ in self.cases:
            assert _score_of(reward.score(sample)) <= reward.max_score

    def test_is_deterministic(self, reward: BaseReward) -> None:
        """Check that a sample always gets the same score, from this reward and from a second instance."""
        second = build_reward(self.name, self.options) if self.name else reward
        for sample, _ in self.cases:
            first = _score_of(reward.score(sample))
            assert _score_of(reward.score(sample)) == first
            assert _score_of(second.score(sample)) == first

    def test_batch_keeps_order(self, reward: BaseReward) -> None:
        """Check that a batch returns each sample's own score, in the order of the samples."""
        samples = [sample for sample, _ in self.cases]
        for batch in (samples, samples[::-1], samples + samples):
            expected = [_score_of(reward.score(sample)) for sample in batch]
            assert [_score_of(value) for value in reward.score_batch(batch)] == pytest.approx(expected)

    def test_empty_batch(self, reward: BaseReward) -> None:
        """Check that an empty batch returns no scores."""
        assert list(reward.score_batch([])) == []

    @pytest.mark.parametrize("finished", [True, False])
    @pytest.mark.parametrize(
        "response",
        ["", " \n\t", "\ufffd\x00", "#" * 50_000, " " * 50_000, "1," * 25_000, "word " * 20_000],
        ids=["empty", "blank", "undecodable", "long-hashes", "long-blanks", "long-digits", "long-text"],
    )
    def test_odd_responses(self, reward: BaseReward, response: str, finished: bool) -> None:
        """Check that any response gets a finite score in reasonable time."""
        for sample, _ in self.cases:
            odd = replace(sample, response=response, finished=finished)
            start = time.perf_counter()
            _score_of(reward.score(odd))
            seconds = time.perf_counter() - start
            assert seconds < self.max_seconds, f"{len(response)} characters took {seconds:.1f} s"

    def test_does_not_change_the_sample(self, reward: BaseReward) -> None:
        """Check that the reward does not change samples, which are shared with metrics and trackers."""
        for sample, _ in self.cases:
            before = copy.deepcopy(sample)
            reward.score(sample)
            assert sample == before

    def test_scores_in_several_threads(self, reward: BaseReward) -> None:
        """Check that several threads can score samples concurrently."""
        samples = [sample for sample, _ in self.cases] * 4
        expected = [_score_of(reward.score(sample)) for sample in samples]
        with ThreadPoolExecutor(4) as threads:
            assert [_score_of(value) for value in threads.map(reward.score, samples)] == pytest.approx(expected)

    def test_pickles(self, reward: BaseReward) -> None:
        """Check that the reward can be pickled, to be sent to workers."""
        clone = pickle.loads(pickle.dumps(reward))
        for sample, _ in self.cases:
            assert _score_of(clone.score(sample)) == _score_of(reward.score(sample))


class Misbehaving(BaseReward):
    """A reward that misbehaves as ``extra_info["do"]`` of the sample says; otherwise the score is the ground truth."""

    name = "misbehaving"

    def score(self, sample: RewardSample) -> Any:
        """Score, or misbehave."""
        do = sample.extra_info.get("do", "score")
        if do == "raise":
            raise KeyError("no such answer")
        if do == "hang":
            time.sleep(3600)
        if do == "exit":
            os._exit(3)
        odd = {"nan": math.nan, "infinity": math.inf, "text": "1.0", "nothing": None}
        truth = float(sample.ground_truth)
        return odd[do] if do in odd else RewardResult(truth, truth > 3, {"twice": 2 * truth})


class AsyncMisbehaving(BaseReward):
    """An asynchronous :class:`Misbehaving`, which awaits first; ``{"do": "late"}`` awaits too long."""

    name = "misbehaving"

    async def score(self, sample: RewardSample) -> Any:
        """Score, or misbehave."""
        await asyncio.sleep(3600 if sample.extra_info.get("do") == "late" else 0.01)
        return Misbehaving().score(sample)


class Placed(BaseReward):
    """A reward that returns the sample's ``extra_info`` as fields of the result."""

    name = "placed"

    def score(self, sample: RewardSample) -> RewardResult:
        """Return the result."""
        return RewardResult(**sample.extra_info)


class RewardManagerSuite:
    """Conformance tests of one reward manager with good and bad samples; subclass it and set the name.

    Attributes:
        name: name of the manager in ``rollcast.reward_managers``.
        options: keys of ``reward.reward_manager_kwargs``.
        ends_hangs: True if only the sample that takes too long is bad.
        survives_exits: True if only the sample that ends its scoring process is bad.
        timeout_s: time limit of a sample in seconds, for samples that hang.
    """

    name: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    ends_hangs: ClassVar[bool] = True
    survives_exits: ClassVar[bool] = False
    timeout_s: ClassVar[float] = 1.0

    @pytest.fixture
    def build(self) -> Iterator[Callable[..., BaseRewardManager]]:
        """Yield a function from fields of :class:`RewardSettings` to the manager under test, which is closed later."""
        built: list[BaseRewardManager] = []

        def build(reward: BaseReward | None = None, **settings: Any) -> BaseRewardManager:
            reward = reward or Misbehaving()
            manager = build_reward_manager(self.name, reward, RewardSettings(**settings), self.options)
            built.append(manager)
            return manager

        yield build
        for manager in built:
            manager.close()
            manager.close()

    def kinds(self) -> list[str]:
        """Return the kinds of bad samples to test."""
        kinds = ["raise", "nan", "infinity", "text", "nothing"]
        return kinds + ["hang"] * self.ends_hangs + ["exit"] * self.survives_exits

    @pytest.mark.parametrize("size", [0, 1, 7, 100])
    def test_good_samples(self, build: Callable[..., BaseRewardManager], size: int) -> None:
        """Check that each sample gets its own result, in order, with every policy."""
        manager = build()
        for samples in (_samples(size), _samples(size)[::-1]):
            results = manager(samples)
            truths = [float(sample.ground_truth) for sample in samples]
            assert [result.score for result in results] == truths
            assert [result.correct for result in results] == [truth > 3 for truth in truths]
            assert [result.extra["twice"] for result in results] == [2 * truth for truth in truths]
            assert not any(result.error or result.dropped for result in results)

    @pytest.mark.parametrize("policy", ["zero", "drop"])
    def test_bad_samples_are_borne(self, build: Callable[..., BaseRewardManager], policy: str) -> None:
        """Check that bad samples have errors, that the others have scores, and that the next batch is not affected."""
        manager = build(on_error=policy, max_bad_share=0.5, timeout_s=self.timeout_s)
        bad = {3 + 5 * place: kind for place, kind in enumerate(self.kinds())}
        results = manager(_samples(50, bad))
        for index, result in enumerate(results):
            if index in bad:
                assert (result.score, result.correct) == (0.0, False)
                assert "misbehaving" in result.error, bad[index]
                assert result.dropped == (policy == "drop")
            else:
                assert (result.score, result.error, result.dropped) == (float(index), "", False)
        assert "no such answer" in results[3].error
        assert [result.score for result in manager(_samples(20))] == [float(index) for index in range(20)]

    def test_a_bad_sample_stops_the_run(self, build: Callable[..., BaseRewardManager]) -> None:
        """Check that a bad sample stops the run with the default policy ``stop``; the error shows reward and sample."""
        for kind in self.kinds():
            manager = build(timeout_s=self.timeout_s)
            with pytest.raises(RewardError) as caught:
                manager(_samples(20, {11: kind}))
            for part in ("misbehaving", "sample 11 of 20", "prompt 11"):
                assert part in str(caught.value), kind

    def test_asynchronous_rewards_are_awaited(self, build: Callable[..., BaseRewardManager]) -> None:
        """Check that asynchronous rewards are awaited, that a late sample is bad, and that the next batch works."""
        manager = build(AsyncMisbehaving(), on_error="zero", max_bad_share=0.5, timeout_s=self.timeout_s)
        for _ in range(2):
            results = manager(_samples(40, {3: "raise", 8: "nan", 13: "late"}))
            expected = [0.0 if index in (3, 8, 13) else float(index) for index in range(40)]
            assert [result.score for result in results] == expected
            assert [index for index, result in enumerate(results) if result.error] == [3, 8, 13]
            assert "no such answer" in results[3].error
            assert "timeout_s" in results[13].error

    def test_scores_are_placed(self, build: Callable[..., BaseRewardManager]) -> None:
        """Check that token scores stay at their tokens, and that turn scores are placed at the turns' last tokens."""
        rows: list[dict[str, Any]] = [
            {"score": 1.0},
            {"score": 0.75, "token_scores": [0.5, 0.25, 0.0, 0.0]},
            {"score": 4.0, "turn_scores": [1.0, 2.0]},
        ]
        samples = [
            RewardSample("p", "r", response_ids=[5, 6, 7, 8], turn_ids=[0, 0, 0, 2], extra_info=fields)
            for fields in rows
        ]
        results = build(Placed())(samples)
        assert [result.score for result in results] == [1.0, 0.75, 4.0]
        scores = [None if result.token_scores is None else list(result.token_scores) for result in results]
        assert scores == [None, [0.5, 0.25, 0.0, 0.0], [0.0, 0.0, 1.0, 2.0]]
        assert all(result.turn_scores is None for result in results)

    def test_scores_that_have_no_place_are_refused(self, build: Callable[..., BaseRewardManager]) -> None:
        """Check that a wrong number of scores, unknown turns, or both kinds of scores make a sample bad."""
        refused: list[tuple[dict[str, Any], list[int], str]] = [
            ({"token_scores": [1.0]}, [], "1 token_scores for 2 response tokens"),
            ({"turn_scores": [1.0]}, [], "the turns of the sample's tokens are not known"),
            ({"turn_scores": [1.0]}, [0, 1], "1 turn_scores for 2 turns"),
            ({"turn_scores": [1.0, math.nan]}, [0, 1], r"turn_scores\[1\] = nan"),
            ({"token_scores": [1.0, 2.0], "turn_scores": [1.0]}, [0, 0], "both token_scores and turn_scores"),
        ]
        for fields, turns, message in refused:
            sample = RewardSample("p", "r", response_ids=[5, 6], turn_ids=turns, extra_info={"score": 1.0, **fields})
            with pytest.raises(RewardError, match=message):
                build(Placed())([sample])

    def test_too_many_bad_samples_stop_the_run(self, build: Callable[..., BaseRewardManager]) -> None:
        """Check that a share of bad samples above the limit stops the run, and that the limit itself does not."""
        manager = build(on_error="zero", max_bad_share=0.25)
        assert sum(bool(result.error) for result in manager(_samples(20, dict.fromkeys(range(5), "nan")))) == 5
        with pytest.raises(RewardError, match="max_bad_share"):
            manager(_samples(20, dict.fromkeys(range(6), "nan")))


def _samples(count: int, bad: Mapping[int, str] | None = None) -> list[RewardSample]:
    return [
        RewardSample(
            f"prompt {index}",
            f"response {index}",
            ground_truth=index,
            response_ids=[1, 2],
            extra_info={"do": (bad or {}).get(index, "score")},
        )
        for index in range(count)
    ]


async def _awaited(value: Awaitable[RewardValue]) -> RewardValue:
    return await value


def _score_of(value: RewardValue | Awaitable[RewardValue], tokens: int | None = None) -> float:
    if inspect.isawaitable(value):
        value = asyncio.run(_awaited(value))
    if isinstance(value, RewardResult) and value.token_scores is not None and tokens:
        assert len(value.token_scores) == tokens, f"{len(value.token_scores)} token_scores for {tokens} tokens"
    if isinstance(value, RewardResult):
        assert value.correct is None or isinstance(value.correct, bool), f"correct is {value.correct!r}"
        for name, number in value.extra.items():
            assert number is None or math.isfinite(number), f"extra number {name!r} is {number}"
        assert value.token_scores is None or value.turn_scores is None, "token_scores and turn_scores together"
        for scores in (value.token_scores, value.turn_scores):
            assert all(math.isfinite(number) for number in scores or ()), f"{scores} are not all finite"
        value = value.score
    assert isinstance(value, int | float), f"a score is a float or a RewardResult, this is {type(value).__name__}"
    assert math.isfinite(value), f"the score is {value}"
    return float(value)
