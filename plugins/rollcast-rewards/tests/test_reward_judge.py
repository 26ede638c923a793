"""The reward ``judge``: what it asks, and how it reads replies; and the judge of sums and of functions in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollcast.contracts.reward import Judge, RewardSample, RewardSettings, build_reward, build_reward_manager
from rollcast.errors import ConfigError, RewardError

SAMPLE = RewardSample("What is 2+2?", "It is 4.", ground_truth="4")


class Scripted(Judge):
    """A judge with one reply, which keeps what it is asked."""

    def __init__(self, reply: str) -> None:
        self.reply = reply
        self.asked: list[Any] = []

    async def ask(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> str:
        self.asked.append((messages, max_tokens))
        return self.reply


def grade(reply: str, on_error: str = "stop", **options: Any) -> tuple[Any, Scripted]:
    reward, judge = build_reward("judge", options), Scripted(reply)
    reward.bind_judge(judge)
    manager = build_reward_manager("naive", reward, RewardSettings(on_error, max_bad_share=1.0))
    (result,) = manager([SAMPLE])
    manager.close()
    return result, judge


@pytest.mark.parametrize(
    ("reply", "options", "score", "correct"),
    [
        ("Right. Score: 10", {}, 1.0, True),
        ("Score: 3 at first, but on second thought\nScore: 7.5", {}, 0.75, False),
        ("Score: 7", {"correct_from": 0.7}, 0.7, True),
        ("Score: 99", {}, 1.0, True),
        ("Score: -4", {}, 0.0, False),
        ("<grade>2</grade>", {"pattern": "<grade>(.*)</grade>", "scale": 4}, 0.5, False),
        ("yes 1", {"pattern": "[01]$", "scale": 1}, 1.0, True),
    ],
)
def test_the_number_in_a_reply_is_the_grade(reply: str, options: dict[str, Any], score: float, correct: bool) -> None:
    result, _ = grade(reply, **options)
    assert result.score == pytest.approx(score)
    assert result.correct is correct
    assert result.extra == {"judge_reply_length": float(len(reply))}


def test_the_judge_sees_question_answer_and_reference() -> None:
    _, judge = grade("Score: 1", system="Be strict.", max_tokens=9)
    ((messages, max_tokens),) = judge.asked
    assert max_tokens == 9
    assert messages[0] == {"role": "system", "content": "Be strict."}
    for text in ("What is 2+2?", "It is 4.", "\n4\n"):
        assert text in messages[1]["content"]
    _, judge = grade("Score: 1", template="{response} or {ground_truth} {{sic}}")
    assert judge.asked[0][0] == [{"role": "user", "content": "It is 4. or 4 {sic}"}]


@pytest.mark.parametrize("reply", ["I cannot say.", "Score: ten", "Score: "])
def test_a_reply_without_a_number_makes_a_bad_sample(reply: str) -> None:
    with pytest.raises(RewardError, match="the judge's reply has no match of"):
        grade(reply)
    result, _ = grade(reply, on_error="drop")
    assert result.dropped


def test_a_run_without_a_judge_is_told_how_to_have_one() -> None:
    with pytest.raises(RewardError, match=r"judge\.enable=true starts one"):
        build_reward_manager("naive", build_reward("judge"))([SAMPLE])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "{prompt} {answer}"}, r"template has the fields answer; valid: prompt, response, ground_truth"),
        ({"template": "{prompt"}, r"template is no format"),
        ({"pattern": "("}, r"pattern is '\(', no regular expression"),
        ({"scale": 0}, r"scale is 0; it has to be above 0"),
        ({"max_tokens": 0}, r"max_tokens is 0"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"reward\.reward_kwargs\.{message}"):
        build_reward("judge", options)


def test_a_sum_gives_its_judge_to_its_parts() -> None:
    parts = [{"name": "judge", "weight": 0.5}, {"name": "exact_match"}]
    reward, judge = build_reward("weighted_sum", {"rewards": parts}), Scripted("Score: 8")
    assert reward.uses_judge
    reward.bind_judge(judge)
    manager = build_reward_manager("batch", reward)
    (result,) = manager([SAMPLE])
    assert result.score == pytest.approx(0.4)
    assert result.extra["judge"] == pytest.approx(0.8)
    assert not build_reward("weighted_sum", {"rewards": [{"name": "exact_match"}]}).uses_judge
    manager.close()


def test_a_function_with_a_parameter_judge_gets_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "async def longer(sample, judge, than=3):\n    return float(len(await judge.ask(sample.response)) > than)\n"
    )
    reward, judge = build_reward("function", {"path": f"{tmp_path}/mine.py:longer", "than": 2}), Scripted("abc")
    assert reward.uses_judge
    reward.bind_judge(judge)
    manager = build_reward_manager("remote", reward)
    assert manager([SAMPLE])[0].score == 1.0
    assert judge.asked == [("It is 4.", None)]
    manager.close()
