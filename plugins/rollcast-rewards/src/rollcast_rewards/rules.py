"""Rewards that compare a response with the reference answer."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from rollcast.contracts.reward import RewardSample
from rollcast.errors import RewardError

__all__ = ["exact_match", "extract_gsm8k_answer", "gsm8k"]

# A single run of white space: with two, rejecting long blanks would take quadratic time.
_ANSWER = re.compile(r"####\s*([-$]{0,2}(?:\d[\d,]*(?:\.\d+)?|\.\d+))")


def exact_match(sample: RewardSample) -> float:
    """Return 1 if the response is finished and equals the ground truth, except for white space around it; else 0.

    Raises:
        RewardError: the sample has no ground truth.
    """
    if sample.ground_truth is None:
        raise RewardError("exact_match needs a ground truth, and the sample has none")
    return float(sample.finished and sample.response.strip() == str(sample.ground_truth).strip())


def gsm8k(sample: RewardSample) -> float:
    """Return 1 if the number after the last ``####`` of the response equals the ground truth; else 0.

    Numbers are compared by value, so "1,080", "$1080." and "1080.00" are equal. A response without ``####``
    and a number after it scores 0. The response may continue after its answer, and may be unfinished.

    Raises:
        RewardError: the ground truth is not a number.
    """
    try:
        expected = Decimal(str(sample.ground_truth).replace(",", "").replace("$", "").strip())
    except InvalidOperation as error:
        raise RewardError(f"gsm8k needs a number as ground truth, this is {sample.ground_truth!r}") from error
    answer = extract_gsm8k_answer(sample.response)
    return float(answer is not None and answer == expected)


def extract_gsm8k_answer(response: str) -> Decimal | None:
    """Return the last number that directly follows a ``####``; None if there is none."""
    answers = _ANSWER.findall(response)
    if not answers:
        return None
    return Decimal(answers[-1].replace(",", "").replace("$", ""))
