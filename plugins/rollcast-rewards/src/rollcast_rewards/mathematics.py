r"""The reward ``math``: mathematical equality of the final answer, by Math-Verify.

Math-Verify reads LaTeX and plain expressions and compares them with SymPy, so that ``\frac{1}{2}``, ``0.5`` and
``50\%`` are one answer. It comes with ``pip install rollcast-rewards[math]`` and is imported when the reward is built.
"""

from __future__ import annotations

import importlib
import logging
import math
import re
from typing import Any

from rollcast.contracts.reward import BaseReward, RewardSample
from rollcast.errors import PluginLoadError, RewardError
from rollcast_rewards.alarm import Alarm, TimeUp

__all__ = ["MathReward"]

#: Time limit in seconds for parsing one answer of a majority vote.
_EXTRACTION_S = 1.0
#: An environment such as a matrix, with the white space around it.
_ENVIRONMENT = re.compile(r"\s*\\begin\{(\w+\*?)\}.*?\\end\{\1\}\s*", re.DOTALL)
#: A dollar sign that opens or ends a formula, and not an amount of money.
_DELIMITER = re.compile(r"(?<!\\)\$")


class MathReward(BaseReward):
    r"""A reward of 1 if the last answer in the response equals the ground truth, else 0.

    The answer is the last ``\boxed{}``; without one, the last formula or number. SymPy
    does not terminate for some expressions: use the manager ``prime``, whose time limit ends them.

    Args:
        boxed_only: accept only answers in ``\boxed{}``.
        float_rounding: digits to which decimal numbers are compared.
        max_characters: number of characters at the end of a response that are read.

    Raises:
        PluginLoadError: Math-Verify is not installed.
    """

    def __init__(self, boxed_only: bool = False, float_rounding: int = 6, max_characters: int = 2000) -> None:
        try:
            self._library: Any = importlib.import_module("math_verify")
        except ImportError as error:
            raise PluginLoadError(
                f"reward.name=math needs Math-Verify, which does not import ({error}); "
                "pip install 'rollcast-rewards[math]'"
            ) from error
        for part in ("parser", "grader"):
            logging.getLogger(f"math_verify.{part}").addFilter(_is_not_about_limits)
        self._options = (boxed_only, float_rounding, max_characters)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._options

    def score(self, sample: RewardSample) -> float:
        """Parse the answer and compare it with the ground truth.

        Raises:
            RewardError: the ground truth is no mathematical expression.
        """
        truth = str(sample.ground_truth)
        expected = self._parse(_as_latex(truth), boxed=False)
        if not expected:
            raise RewardError(f"math needs a mathematical expression as ground truth, this is {truth!r}")
        answer = self._parse_response(sample.response)
        return float(self._library.verify(expected, answer, float_rounding=self._options[1], timeout_seconds=None))

    def extract(self, response: str) -> str | None:
        """Return the last answer, normalized so that most equal answers are equal texts; None without an answer.

        Numbers become decimals; products in other expressions are expanded. An expression that takes SymPy
        longer than a second is returned as written.
        """
        with Alarm(_EXTRACTION_S) as alarm:
            try:
                return alarm.call(self._read, response)
            except TimeUp:
                alarm.disarm()
        text = " ".join(response[response.rfind("\\boxed") + 1 :].split())
        return text or None

    def _read(self, response: str) -> str | None:
        answer = self._parse_response(response)
        if not answer:
            return None
        expression = answer[0]
        if getattr(expression, "is_Equality", False) and getattr(expression.lhs, "is_Symbol", False):
            expression = expression.rhs
        try:
            if getattr(expression, "is_number", False) and getattr(expression, "is_real", False):
                value = float(expression.evalf())
                return _as_decimal(value, self._options[1]) if math.isfinite(value) else str(answer[-1])
            return str(expression.expand() if hasattr(expression, "expand") else expression)
        except (ArithmeticError, AttributeError, TypeError, ValueError, NotImplementedError):
            return str(answer[-1])

    def _parse_response(self, response: str) -> list[Any]:
        boxed_only, _, longest = self._options
        text = response[-longest:]
        start = text.rfind("\\boxed")
        if start < 0 and boxed_only:
            return []
        return self._parse(text[max(start, 0) :], boxed=start >= 0)

    def _parse(self, text: str, boxed: bool) -> list[Any]:
        """Return SymPy's expression and the text it was parsed from; each only if there is one."""
        # The library ends an inline formula at the end of its line; LaTeX reads that as a space.
        text = _ENVIRONMENT.sub(lambda match: f" {_on_one_line(match[0])} ", text)
        library = self._library
        latex = library.LatexExtractionConfig(boxed_match_priority=0)
        configs = [latex] if boxed else [latex, library.ExprExtractionConfig()]
        # The library's own time limits use SIGALRM, which the managers need for theirs.
        return list(library.parse(text, configs, parsing_timeout=None))


def _is_not_about_limits(record: logging.LogRecord) -> bool:
    # Math-Verify warns that its time is not limited; the manager limits it.
    return not str(record.msg).startswith("Timeout is disabled")


def _as_decimal(value: float, digits: int) -> str:
    text = f"{value:.{digits}f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


def _as_latex(truth: str) -> str:
    return truth if "\\boxed" in truth or _DELIMITER.search(truth) else f"${_on_one_line(truth)}$"
