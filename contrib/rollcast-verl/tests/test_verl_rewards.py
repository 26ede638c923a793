"""verl's scores and reward managers give verl's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rollcast.contracts.reward import (
    BaseReward,
    RewardResult,
    RewardSample,
    RewardSettings,
    build_reward,
    build_reward_manager,
)
from rollcast.errors import ConfigError, RewardError

pytest.importorskip("verl.utils.reward_score")

SAMPLES = [
    RewardSample("2+3?", "so #### 5", "5", "openai/gsm8k", response_ids=(7, 8, 9)),
    RewardSample("2+4?", "#### 7", "6", "openai/gsm8k", response_ids=(7, 8)),
    RewardSample("6*7?", "the answer is 42. #### 42", "42", "openai/gsm8k", response_ids=tuple(range(40))),
]
OVERLONG = {"max_resp_len": 48, "overlong_buffer_cfg": {"enable": True, "len": 16, "penalty_factor": 1.0, "log": True}}
NAMES = ["verl_naive", "verl_dapo", "verl_batch", "verl_prime", "verl_loop_naive", "verl_loop_dapo"]


class Length(BaseReward):
    """A reward that returns a result with parts, and sees what the sample has."""

    def score(self, sample: RewardSample) -> RewardResult:
        assert sample.extra_info["level"] == 3 and not any(key.startswith("__rollcast") for key in sample.extra_info)
        return RewardResult(len(sample.response) / 100, correct=True, extra={"length": len(sample.response)})


class Asynchronous(BaseReward):
    async def score(self, sample: RewardSample) -> float:
        return float(len(sample.prompt))


def test_the_reward_verl_scores_by_the_source_of_a_row() -> None:
    reward = build_reward("verl")
    assert [reward.score(sample) for sample in SAMPLES] == [1.0, 0.0, 1.0]
    dapo = RewardSample("", "Answer: 5", "5", "math_dapo")
    result = reward.score(dapo)
    assert isinstance(result, RewardResult) and result.score == 1.0 and result.correct is True


def test_a_function_of_verl_is_named_by_module_and_name() -> None:
    reward = build_reward("verl", {"function": "verl.utils.reward_score.math_dapo:last_boxed_only_string"})
    assert not reward.is_async
    with pytest.raises(ConfigError, match=r"has no function 'scores'"):
        build_reward("verl", {"function": "verl.utils.reward_score.gsm8k:scores"})


@pytest.mark.parametrize("name", NAMES)
def test_a_manager_of_verl_gives_the_scores_of_the_reward(name: str) -> None:
    manager = build_reward_manager(name, build_reward("verl"), RewardSettings())
    assert [result.score for result in manager(SAMPLES)] == [1.0, 0.0, 1.0]
    assert manager([]) == []


@pytest.mark.parametrize("name", ["verl_dapo", "verl_loop_dapo"])
def test_the_penalty_for_long_responses_is_verls(name: str) -> None:
    manager = build_reward_manager(name, build_reward("verl"), RewardSettings(), OVERLONG)
    scores = [result.score for result in manager(SAMPLES)]
    assert scores == pytest.approx([1.0, 0.0, 1.0 - 8 / 16])
    ours = {"overlong_buffer": {"len": 16, "penalty_factor": 1.0}}
    own = build_reward_manager("dapo", build_reward("verl"), RewardSettings(max_response_length=48), ours)
    assert [result.score for result in own(SAMPLES)] == pytest.approx(scores)


@pytest.mark.parametrize("name", ["verl_naive", "verl_loop_naive"])
def test_numbers_that_are_not_finite_end_the_run(name: str) -> None:
    class Unbounded(BaseReward):
        def score(self, sample: RewardSample) -> RewardResult:
            return RewardResult(1.0, extra={"length": float("nan")})

    with pytest.raises(RewardError, match=r"length = nan, which is not finite"):
        build_reward_manager(name, Unbounded(), RewardSettings())(SAMPLES)


@pytest.mark.parametrize("name", ["verl_naive", "verl_batch", "verl_loop_naive"])
def test_parts_of_a_score_pass_through(name: str) -> None:
    samples = [RewardSample("p", "x" * 7, "", "s", response_ids=(1, 2), extra_info={"level": 3})]
    (result,) = build_reward_manager(name, Length(), RewardSettings())(samples)
    assert (result.score, result.correct, result.extra["length"]) == (pytest.approx(0.07), True, 7.0)
    assert result.token_scores is None


def test_an_asynchronous_reward_is_awaited() -> None:
    for name in ("verl_naive", "verl_loop_naive"):
        results = build_reward_manager(name, Asynchronous(), RewardSettings())(SAMPLES)
        assert [result.score for result in results] == [4.0, 4.0, 4.0]


def test_what_verls_managers_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="on_error is 'zero'"):
        build_reward_manager("verl_naive", build_reward("verl"), RewardSettings(on_error="zero"))
    with pytest.raises(ConfigError, match="max_resp_len"):
        options: Mapping[str, Any] = {"overlong_buffer_cfg": OVERLONG["overlong_buffer_cfg"]}
        build_reward_manager("verl_dapo", build_reward("verl"), RewardSettings(), options)(SAMPLES)
    unknown = RewardSample("", "x", "y", "nobody", response_ids=(1,))
    with pytest.raises(RewardError, match=r"verl's reward manager 'naive' failed.*nobody"):
        build_reward_manager("verl_naive", build_reward("verl"), RewardSettings())([unknown])
