"""The reward ``judge``, for which a language model, served by replicas of the run, grades the response."""

from __future__ import annotations

import math
import re
from string import Formatter
from typing import Any

from rollcast.contracts.reward import BaseReward, RewardResult, RewardSample
from rollcast.errors import ConfigError, RewardError

__all__ = ["JudgeReward"]

_KEY = "reward.reward_kwargs"
_FIELDS = ("prompt", "response", "ground_truth")
_TEMPLATE = """\
Grade the answer to the question below.

Question:
{prompt}

Reference answer:
{ground_truth}

Answer to grade:
{response}

Say in a sentence what is right and what is wrong about it, and end with a line "Score: N", where N is a number from 0 \
(wrong) to 10 (right)."""
_PATTERN = r"[Ss]core:\s*(-?\d+(?:\.\d+)?)"
_EXCERPT = 200


class JudgeReward(BaseReward):
    """A reward that asks the run's judge for a grade, and reads the number in its reply.

    The score is the number divided by ``scale``, clamped to the range from 0 to 1. A reply without a number makes the
    sample bad; see ``reward.on_error``. The metric ``judge_reply_length`` is the length of the reply in characters.

    Args:
        template: question to the judge, with the fields ``{prompt}``, ``{response}`` and ``{ground_truth}``.
        system: content of a system message before it; None for none.
        pattern: regular expression whose last match, or its first group if it has one, is the number.
        scale: number of the best grade.
        correct_from: score from which an answer counts as correct.
        max_tokens: length of a reply in tokens; None for ``judge.max_tokens``.

    Raises:
        ConfigError: the template has an unknown field, the pattern is invalid, or a number is out of range.
    """

    def __init__(
        self,
        template: str = _TEMPLATE,
        system: str | None = None,
        pattern: str = _PATTERN,
        scale: float = 10.0,
        correct_from: float = 1.0,
        max_tokens: int | None = None,
    ) -> None:
        try:
            fields = {field for _, field, _, _ in Formatter().parse(template) if field is not None}
        except ValueError as error:
            raise ConfigError(f"{_KEY}.template is no format: {error}; write a brace of the text twice") from error
        if not fields <= set(_FIELDS):
            unknown = ", ".join(sorted(fields - set(_FIELDS)))
            raise ConfigError(f"{_KEY}.template has the fields {unknown}; valid: {', '.join(_FIELDS)}")
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"{_KEY}.pattern is {pattern!r}, no regular expression: {error}") from error
        if not scale > 0:
            raise ConfigError(f"{_KEY}.scale is {scale}; it has to be above 0")
        if max_tokens is not None and max_tokens < 1:
            raise ConfigError(f"{_KEY}.max_tokens is {max_tokens}; it must be at least 1")
        self._template, self._system = template, system
        self._scale, self._correct_from, self._max_tokens = scale, correct_from, max_tokens

    @property
    def uses_judge(self) -> bool:
        return True

    async def score(self, sample: RewardSample) -> RewardResult:
        """Return the judge's grade.

        Raises:
            RewardError: there is no judge, or its reply has no number.
        """
        if self.judge is None:
            raise RewardError("the reward judge was not given a judge; in a run, judge.enable=true starts one")
        reply = await self.judge.ask(self.messages(sample), max_tokens=self._max_tokens)
        grade = self._read(reply)
        if grade is None:
            raise RewardError(f"the judge's reply has no match of {self._pattern.pattern!r}: {reply[-_EXCERPT:]!r}")
        score = min(max(grade / self._scale, 0.0), 1.0)
        return RewardResult(score, score >= self._correct_from, {"judge_reply_length": float(len(reply))})

    def messages(self, sample: RewardSample) -> list[dict[str, Any]]:
        """Return the conversation that the judge answers."""
        fields = {"prompt": sample.prompt, "response": sample.response, "ground_truth": sample.ground_truth}
        question = {"role": "user", "content": self._template.format(**fields)}
        return [question] if self._system is None else [{"role": "system", "content": self._system}, question]

    def _read(self, reply: str) -> float | None:
        matches = list(self._pattern.finditer(reply))
        if not matches:
            return None
        text = matches[-1].group(1 if self._pattern.groups else 0)
        try:
            number = float(text)
        except (TypeError, ValueError):
            return None
        return number if math.isfinite(number) else None
