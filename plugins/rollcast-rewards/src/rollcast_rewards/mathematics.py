r"""The reward ``math``: mathematical equality of the final answer, as Math-Verify sees it.

Math-Verify reads LaTeX and plain expressions and compares them with SymPy, so that ``\frac{1}{2}``, ``0.5`` and
``50\%`` are one answer. It comes with ``pip install rollcast-rewards[math]`` and is imported when the reward is built.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from rollcast.contracts.reward import BaseReward, RewardSample
from rollcast.errors import PluginLoadError, RewardError

__all__ = ["MathReward"]


class MathReward(BaseReward):
    r"""1 if the last answer in the response equals the ground truth, else 0.

    The answer is the last ``\boxed{}``; without one, the last formula or number. Some expressions keep SymPy
    busy without end: let the manager ``prime`` score, whose time limit ends them.

    Args:
        boxed_only: an answer has to stand in ``\boxed{}``.
        float_rounding: digits to which decimal numbers are compared.
        max_characters: only the last so many characters of a response are read.

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
        """Parse and compare.

        Raises:
            RewardError: the ground truth is no mathematical expression.
        """
        boxed_only, rounding, longest = self._options
        library = self._library
        truth = str(sample.ground_truth)
        latex = library.LatexExtractionConfig(boxed_match_priority=0)
        plain = library.ExprExtractionConfig()
        # The library's own time limits are alarms, which the managers need for theirs.
        expected = library.parse(_as_latex(truth), [latex, plain], parsing_timeout=None)
        if not expected:
            raise RewardError(f"math needs a mathematical expression as ground truth, this is {truth!r}")
        text = sample.response[-longest:]
        start = text.rfind("\\boxed")
        if start < 0 and boxed_only:
            return 0.0
        given = library.parse(text[max(start, 0) :], [latex] if start >= 0 else [latex, plain], parsing_timeout=None)
        return float(library.verify(expected, given, float_rounding=rounding, timeout_seconds=None))


def _is_not_about_limits(record: logging.LogRecord) -> bool:
    # It warns that nobody limits its time; the manager does.
    return not str(record.msg).startswith("Timeout is disabled")


def _as_latex(truth: str) -> str:
    return truth if "\\boxed" in truth or "$" in truth else f"${truth}$"
