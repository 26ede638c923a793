"""Multiple choice, format, MATH, sums of rewards, and the penalty for long responses."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollcast.contracts.reward import BaseReward, RewardResult, RewardSample, RewardSettings, build_reward
from rollcast.errors import ConfigError, PluginLoadError, PluginNotFoundError, RewardError
from rollcast_rewards.choices import FormatReward, MultipleChoice
from rollcast_rewards.mathematics import MathReward
from rollcast_rewards.overlong import DapoRewardManager, OverlongBuffer, overlong_penalty
from rollcast_testing.reward import RewardSuite


def choice(response: str, truth: object = "B", score: float = 1.0) -> tuple[RewardSample, float]:
    return RewardSample("Which one?", response, ground_truth=truth), score


class TestMultipleChoice(RewardSuite):
    name = "multiple_choice"
    options = {"choices": "ABCD"}  # noqa: RUF012
    cases = (
        choice("B"),
        choice("(B)"),
        choice("It must be B."),
        choice("The answer is B"),
        choice("the answer is (b)."),
        choice("Answer: **B**"),
        choice(r"so \boxed{B}"),
        choice(r"so \boxed{\text{B}}"),
        choice("<answer> B </answer>"),
        choice("The answer is A. No, the answer is B."),
        choice("A is wrong, C too. Answer: B because of A"),
        choice("B", truth=1),
        choice("B", truth="(b)"),
        choice("A", score=0.0),
        choice("", score=0.0),
        choice("The answer is A", score=0.0),
        choice("The answer is Bob", score=0.0),
        choice("the answer is a bit hard: C", score=0.0),
        choice("B is what I thought at first", score=0.0),
        choice("CAB", score=0.0),
    )


def test_the_letter_that_is_chosen() -> None:
    reward = MultipleChoice("ABCD")
    assert reward.extract("the answer is a difficult one") == "A"  # an article cannot be told from a letter
    assert reward.extract("Is the answer A or B? I cannot say") is None
    assert reward.extract("I'd say (C).") == "C"


@pytest.mark.parametrize("truth", ["E", "", None, 4, -1, True, "AB"])
def test_ground_truths_that_are_no_choice(truth: object) -> None:
    with pytest.raises(RewardError, match="needs one of A, B, C, D as ground truth"):
        MultipleChoice("ABCD").score(RewardSample("?", "A", ground_truth=truth))


@pytest.mark.parametrize("choices", ["", "A B", "AA", "aA", "A|B"])
def test_choices_that_are_none(choices: str) -> None:
    with pytest.raises(ConfigError, match="different letters"):
        MultipleChoice(choices)


class TestFormat(RewardSuite):
    name = "format"
    cases = (
        (RewardSample("?", "<think>a\nb</think>\n<answer>4</answer>"), 1.0),
        (RewardSample("?", "  <think></think><answer></answer>\n"), 1.0),
        (RewardSample("?", "<think>a</think> so <answer>4</answer>"), 0.0),
        (RewardSample("?", "<think>a</think><answer>4</answer> and more"), 0.0),
        (RewardSample("?", "<think>a</think><think>b</think><answer>4</answer>"), 0.0),
        (RewardSample("?", "<answer>4</answer>"), 0.0),
    )


def test_other_formats() -> None:
    sample = RewardSample("?", "the number 42, perhaps")
    assert FormatReward(r"\d+").score(sample) == 0.0
    assert FormatReward(r"\d+", search=True).score(sample) == 1.0
    assert FormatReward(r"\d+", search=True, forbidden=["perhaps"]).score(sample) == 0.0
    with pytest.raises(ConfigError, match=r"'\(' is not a regular expression"):
        FormatReward("(")


def math(response: str, truth: str, score: float = 1.0) -> tuple[RewardSample, float]:
    return RewardSample("?", response, ground_truth=truth), score


#: A matrix over several lines, as data sets write them.
MATRIX = "\\begin{pmatrix}\n1 & 2 \\\\\n3 & 19\n\\end{pmatrix}"


class TestMath(RewardSuite):
    name = "math"
    max_seconds = 30.0
    cases = (
        math(r"Hence \boxed{\frac{1}{2}}.", r"\frac12"),
        math(r"Hence \boxed{0.5}.", r"\frac{1}{2}"),
        math(r"\boxed{3} was wrong; it is \boxed{4}", "4"),
        math(r"The answer is $x = 3$", "3"),
        math(r"\boxed{\{1, 2\}}", r"\{2, 1\}"),
        math(r"\boxed{2\sqrt{2}}", r"\sqrt{8}"),
        math(r"\boxed{1,080}", "1080"),
        math(rf"\boxed{{{MATRIX}}}", MATRIX),
        math(f"It is\n$\n{MATRIX}\n$", MATRIX),
        math(r"\boxed{19}", MATRIX, 0.0),
        math(r"\boxed{18.90}", r"\$18.90"),
        math(r"\boxed{\$18.90}", r"\$18.90"),
        math(r"\boxed{18.09}", r"\$18.90", 0.0),
        math(r"\boxed{4}", "5", 0.0),
        math("no idea", "5", 0.0),
    )

    @pytest.fixture(autouse=True)
    def library(self) -> None:
        pytest.importorskip("math_verify")


def test_math_options_and_ground_truths() -> None:
    pytest.importorskip("math_verify")
    reward = build_reward("math", {"boxed_only": True})
    assert reward.score(RewardSample("?", "The answer is 4", ground_truth="4")) == 0.0
    assert reward.score(RewardSample("?", r"The answer is \boxed{4}, not 5", ground_truth="4")) == 1.0
    with pytest.raises(RewardError, match="math needs a mathematical expression as ground truth"):
        reward.score(RewardSample("?", "4", ground_truth=""))


@pytest.mark.parametrize(
    "equal",
    [
        [r"\boxed{\frac{1}{2}}", r"so it is \boxed{0.5}", r"\boxed{\frac12}", "The answer is $x = 1/2$"],
        [r"\boxed{2\sqrt{2}}", r"\boxed{\sqrt{8}}"],
        [r"\boxed{(x-1)(x+1)}", r"\boxed{x^2-1}"],
        [r"\boxed{1{,}080}", r"\boxed{1080}", "1080"],
        [r"\boxed{\{1, 2\}}", r"\boxed{\{2, 1\}}"],
        [r"\boxed{\text{East}}", r"\boxed{\text{east}}"],
        ["no idea", ""],
    ],
)
def test_equal_answers_are_one_vote(equal: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify")
    # A busy machine may need longer than the usual second.
    monkeypatch.setattr("rollcast_rewards.mathematics._EXTRACTION_S", 60.0)
    reward = build_reward("math")
    assert isinstance(reward, MathReward)
    answers = {reward.extract(response) for response in equal}
    assert len(answers) == 1
    assert (answers == {None}) == (equal[0] == "no idea")


def test_different_answers_are_different_votes() -> None:
    pytest.importorskip("math_verify")
    reward: Any = build_reward("math")
    responses = [
        r"\boxed{1}",
        r"\boxed{-1}",
        r"\boxed{10}",
        r"\boxed{0.1}",
        r"\boxed{10^{400}}",
        r"\boxed{10^{401}}",
        r"\boxed{x}",
        r"\boxed{2x}",
        r"\boxed{\pi}",
    ]
    assert len({reward.extract(response) for response in responses}) == len(responses)
    boxed_only: Any = build_reward("math", {"boxed_only": True})
    assert boxed_only.extract("The answer is 3") is None


def test_an_answer_that_cannot_be_calculated_is_a_vote_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify")
    monkeypatch.setattr("rollcast_rewards.mathematics._EXTRACTION_S", 0.2)
    reward: Any = build_reward("math")
    monkeypatch.setattr(type(reward), "_read", lambda self, response: time.sleep(60))
    votes = [reward.extract(f"so it is {answer}") for answer in (r"\boxed{9^{9^9}}", r"\boxed{9^{9^9}}", r"\boxed{8}")]
    assert votes[0] == votes[1] != votes[2]


def test_math_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(PluginLoadError, match=r"pip install 'rollcast-rewards\[math\]'"):
        build_reward("math")


# -- weighted sums ------------------------------------------------------------------------------

PARTS = [{"name": "gsm8k"}, {"name": "format", "weight": 0.5, "reward_kwargs": {"pattern": r"\d+.*"}}]


class TestWeightedSum(RewardSuite):
    name = "weighted_sum"
    options = {"rewards": PARTS}  # noqa: RUF012
    cases = (
        (RewardSample("?", "4 = #### 4", ground_truth="4"), 1.5),
        (RewardSample("?", "#### 4", ground_truth="4"), 1.0),
        (RewardSample("?", "4 = #### 5", ground_truth="4"), 0.5),
        (RewardSample("?", "?", ground_truth="4"), 0.0),
    )


def test_a_sum_says_what_it_is_made_of() -> None:
    reward = build_reward("weighted_sum", {"rewards": [*PARTS, {"name": "gsm8k", "weight": -1}]})
    assert reward.max_score == 1.5
    result = reward.score(RewardSample("?", "#### 4", ground_truth="4"))
    assert result == RewardResult(0.0, True, {"gsm8k": 1.0, "format": 0.0, "gsm8k_2": 1.0})
    code = {"name": "code", "weight": 2}
    nested = build_reward("weighted_sum", {"rewards": [code]})
    result = nested.score(RewardSample("?", "no program", ground_truth="assert True"))
    assert result == RewardResult(0.0, False, {"code": 0.0, "code/passed": 0.0})


@pytest.mark.parametrize(
    ("parts", "error", "says"),
    [
        ([], ConfigError, r"reward.reward_kwargs.rewards is empty"),
        ([{"weight": 1}], ConfigError, r"rewards\[0\] is"),
        ([PARTS[0], {"name": "gsm8k", "wait": 1}], ConfigError, r"rewards\[1\] is"),
        ([{"name": "gsm8k", "weight": "much"}], ConfigError, r"rewards\[0\].weight is 'much'"),
        ([{"name": "gsm8k", "reward_kwargs": {"x": 1}}], ConfigError, r"do not fit reward 'gsm8k'"),
        ([{"name": "gsm9k"}], PluginNotFoundError, r"gsm9k.*gsm8k"),
    ],
)
def test_sums_that_cannot_be(parts: list[Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"(?s){says}"):
        build_reward("weighted_sum", {"rewards": parts})


# -- the penalty of DAPO ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "penalty"),
    # A limit of 100 tokens and a buffer of 20: nothing up to 80, all of 0.5 at 100.
    [(0, 0.0), (79, 0.0), (80, 0.0), (81, -0.025), (90, -0.25), (100, -0.5)],
)
def test_the_penalty_by_hand(length: int, penalty: float) -> None:
    assert overlong_penalty(length, 100, OverlongBuffer(True, 20, 0.5)) == pytest.approx(penalty)


@given(
    limit=st.integers(1, 4000),
    share=st.floats(0.001, 1),
    factor=st.floats(0, 10),
    length=st.integers(0, 4000),
)
def test_the_penalty_grows_with_length_and_stays_in_its_range(
    limit: int, share: float, factor: float, length: int
) -> None:
    buffer = OverlongBuffer(True, max(int(limit * share), 1), factor)
    length = min(length, limit)
    penalty = overlong_penalty(length, limit, buffer)
    assert -factor - 1e-9 <= penalty <= 0
    assert overlong_penalty(min(length + 1, limit), limit, buffer) <= penalty
    assert overlong_penalty(limit, limit, buffer) == pytest.approx(-factor)


class Right(BaseReward):
    name = "right"

    def score(self, sample: RewardSample) -> float:
        return 1.0 if sample.response == "right" else float("nan")


def test_dapo_takes_the_penalty_from_the_score_and_not_from_the_accuracy() -> None:
    manager = DapoRewardManager(
        Right(),
        RewardSettings("zero", 0.5, max_response_length=10),
        {"enable": True, "len": 4, "penalty_factor": 2.0},
    )
    texts = ["right", "right", "wrong"]
    results = manager(
        [RewardSample("?", text, response_ids=range(length)) for text, length in zip(texts, (6, 9, 10), strict=True)]
    )
    assert [result.score for result in results] == pytest.approx([1.0, -0.5, 0.0])
    assert [result.correct for result in results] == [True, True, False]
    assert results[1].extra == {"overlong_penalty": -1.5}
    assert "nan" in results[2].error
    assert results[2].extra == {}


@pytest.mark.parametrize(
    ("buffer", "limit", "says"),
    [
        ({"enable": True, "len": 0}, 10, r"overlong_buffer.len is 0; it has to be from 1 to .* = 10"),
        ({"enable": True, "len": 11}, 10, r"overlong_buffer.len is 11"),
        ({"enable": True, "len": 1}, None, r"needs the run's limit"),
        ({"enable": True, "len": 1, "penalty_factor": -1}, 10, r"penalty_factor is -1"),
        ({"enabled": True}, 10, r"has the keys enabled; valid: enable, len, penalty_factor"),
    ],
)
def test_buffers_that_cannot_be(buffer: dict[str, Any], limit: int | None, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DapoRewardManager(Right(), RewardSettings(max_response_length=limit), buffer)


def test_without_a_buffer_there_is_no_penalty() -> None:
    manager = DapoRewardManager(Right(), RewardSettings(), {"enable": False, "len": -3})
    assert manager([RewardSample("?", "right", response_ids=range(99))]) == [RewardResult(1.0)]
