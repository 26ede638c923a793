"""The rewards ``multiple_choice`` and ``format``: the chosen letter, and the form of a response."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollcast.contracts.reward import BaseReward, RewardSample
from rollcast.errors import ConfigError, RewardError

__all__ = ["FormatReward", "MultipleChoice"]

_KEY = "reward.reward_kwargs"


class MultipleChoice(BaseReward):
    r"""A reward of 1 if the response chooses the right letter, else 0.

    The choice is the last one of those written ``\boxed{B}``, ``answer is (B)``, ``Answer: B`` or
    ``<answer>B</answer>``; a response without any of them has to be the letter itself, alone or as in ``(B)`` or
    ``B.`` at its very end. The ground truth is the letter, or the choice's number from 0.

    Args:
        choices: letters of the choices, in order.

    Raises:
        ConfigError: the choices are not different letters or digits.
    """

    def __init__(self, choices: str = "ABCDEFGHIJ") -> None:
        letters = choices.upper()
        if not letters.isalnum() or len(set(letters)) != len(letters):
            raise ConfigError(f"{_KEY}.choices is {choices!r}; it has to be different letters, such as ABCD")
        self._letters = letters
        one = f"[{letters}{letters.lower()}]"
        marks = r"[\s*(\[{$:\"']{0,8}"
        self._marked = re.compile(
            rf"\\boxed\s?\{{{marks}(?:\\text\s?\{{)?[\s(]?({one})\b"
            rf"|\banswer\b(?:\s?(?:is|:|=)){{1,2}}{marks}({one})\b(?!')"
            rf"|<answer>\s?{marks}({one})\b",
            re.IGNORECASE,
        )
        self._bare = re.compile(rf"(?:^|[\s(\[*])([{letters}])[)\].*]{{0,3}}$")

    def extract(self, response: str) -> str | None:
        """Return the letter that the response chooses, in upper case; None if it chooses none."""
        last = None
        for match in self._marked.finditer(response):
            last = match
        if last is not None:
            return next(group for group in last.groups() if group).upper()
        bare = self._bare.search(response.rstrip()[-8:])
        return bare[1].upper() if bare else None

    def score(self, sample: RewardSample) -> float:
        """Compare the choices.

        Raises:
            RewardError: the ground truth is not one of the choices.
        """
        return float(self.extract(sample.response) == self._expected(sample.ground_truth))

    def _expected(self, truth: object) -> str:
        if isinstance(truth, int) and not isinstance(truth, bool) and 0 <= truth < len(self._letters):
            return self._letters[truth]
        letter = str(truth).strip().strip("()").upper()
        if len(letter) != 1 or letter not in self._letters:
            raise RewardError(f"multiple_choice needs one of {', '.join(self._letters)} as ground truth, not {truth!r}")
        return letter


class FormatReward(BaseReward):
    r"""A reward of 1 if the whole response matches a regular expression, else 0.

    ``.`` matches line ends too. White space around the response does not count. This reward needs no
    ground truth. A sample never counts as correct by its form alone where ``format`` is one of
    several rewards; see ``weighted_sum``.

    Args:
        pattern: regular expression. The default matches a thought and then an answer, each in its tags.
        search: accept responses that contain the pattern anywhere.
        forbidden: texts that must not occur.

    Raises:
        ConfigError: the pattern is not a regular expression.
    """

    def __init__(
        self,
        pattern: str = r"<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>",
        search: bool = False,
        forbidden: Sequence[str] = (),
    ) -> None:
        try:
            compiled = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(f"{_KEY}.pattern {pattern!r} is not a regular expression: {error}") from error
        self._matches = compiled.search if search else compiled.fullmatch
        self._forbidden = tuple(forbidden)

    def score(self, sample: RewardSample) -> float:
        response = sample.response.strip()
        if any(text in response for text in self._forbidden):
            return 0.0
        return float(self._matches(response) is not None)
