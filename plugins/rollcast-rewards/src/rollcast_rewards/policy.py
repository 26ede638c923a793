"""Checks of a reward's values, and the treatment of bad samples in a batch."""

from __future__ import annotations

import logging
import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollcast.contracts.reward import (
    BaseReward,
    BaseRewardManager,
    RewardResult,
    RewardSample,
    RewardSettings,
    finite_number,
)
from rollcast.errors import RewardError

__all__ = [
    "Failure",
    "Outcomes",
    "Outcome",
    "PolicyRewardManager",
    "check_value",
    "describe_error",
    "timed_out",
]

logger = logging.getLogger(__name__)
_EXCERPT = 200


@dataclass(frozen=True)
class Failure:
    """The reason why a sample has no score.

    Attributes:
        kind: ``raised``, ``timeout``, ``value``, ``memory`` or ``died`` (the process of the sample died).
        what: description in the past tense, such as ``failed: KeyError: 'x'``.
        cause: exception, if it was raised in this process.
    """

    kind: str
    what: str
    cause: BaseException | None = None


Outcome = RewardResult | Failure


def describe_error(error: BaseException) -> str:
    """Return class and message of an exception; the class alone if the message is empty."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def failure_of(error: BaseException) -> Failure:
    """Return the failure for an exception of a reward."""
    kind = "memory" if isinstance(error, MemoryError) else "raised"
    return Failure(kind, f"failed: {describe_error(error)}", error)


def timed_out(seconds: float | None, what: str = "") -> Failure:
    """Return the failure of a sample that took too long."""
    return Failure("timeout", f"took longer than reward.timeout_s = {seconds:g} s{what}" if seconds else "hung")


def check_value(value: Any, sample: RewardSample) -> Outcome:
    """Return a reward's value as a result of plain floats, with scores at their tokens; or return a failure."""
    result = value if isinstance(value, RewardResult) else RewardResult(value)
    try:
        return replace(
            result,
            score=finite_number("score", result.score),
            correct=None if result.correct is None else bool(result.correct),
            extra={
                str(name): None if item is None else finite_number(str(name), item)
                for name, item in result.extra.items()
            },
            token_scores=_place_scores(result, sample),
            turn_scores=None,
            columns={str(name): _plain(item) for name, item in result.columns.items()},
        )
    except Exception as problem:  # noqa: BLE001 -- the fields of a result are a user's values
        said = str(problem) if isinstance(problem, ValueError) else f"gave a result that is not one: {problem!r}"
        return Failure("value", said)


def _place_scores(result: RewardResult, sample: RewardSample) -> tuple[float, ...] | None:
    """Return one score per response token; None for a result that has only a whole score."""
    tokens = len(sample.response_ids)
    if result.token_scores is not None:
        if result.turn_scores is not None:
            raise ValueError("gave both token_scores and turn_scores; give one of them")
        if len(result.token_scores) != tokens:
            raise ValueError(f"gave {len(result.token_scores)} token_scores for {tokens} response tokens")
        return tuple(finite_number(f"token_scores[{place}]", item) for place, item in enumerate(result.token_scores))
    if result.turn_scores is None:
        return None
    if len(sample.turn_ids) != tokens or not tokens:
        raise ValueError(
            f"gave {len(result.turn_scores)} turn_scores, but the turns of the sample's tokens are not known "
            f"({len(sample.turn_ids)} turn ids for {tokens} tokens); give one score, or token_scores"
        )
    # The last token of a turn precedes a token with another turn id.
    ids = [*sample.turn_ids, None]
    ends = [place for place in range(tokens) if ids[place] != ids[place + 1]]
    if len(result.turn_scores) != len(ends):
        raise ValueError(f"gave {len(result.turn_scores)} turn_scores for {len(ends)} turns")
    placed = [0.0] * tokens
    for turn, (end, item) in enumerate(zip(ends, result.turn_scores, strict=True)):
        placed[end] = finite_number(f"turn_scores[{turn}]", item)
    return tuple(placed)


class Outcomes:
    """A collector of the outcomes of one batch, in any order, that applies the policy for bad samples.

    Args:
        name: name of the reward, for messages.
        samples: samples of the batch.
        settings: policy for bad samples.
        bad: number of samples that were found to be bad before, for the largest share.
    """

    def __init__(self, name: str, samples: Sequence[RewardSample], settings: RewardSettings, bad: int = 0) -> None:
        self._name = name
        self._samples = samples
        self._settings = settings
        self._bad = bad
        self._results: list[RewardResult | None] = [None] * len(samples)
        self._failures: dict[int, Failure] = {}
        #: Samples without an outcome so far.
        self.undecided = len(samples)

    def add(self, index: int, outcome: Outcome) -> None:
        """Record the outcome of one sample.

        Raises:
            RewardError: the policy is to stop, or too many samples are bad.
        """
        self.undecided -= self._results[index] is None
        if isinstance(outcome, RewardResult):
            self._results[index] = outcome
            return
        self._failures[index] = outcome
        error = f"reward {self._name} {outcome.what}"
        if self._settings.on_error == "stop":
            raise RewardError(f"{error}\n{self._show(index)}") from outcome.cause
        dropped = self._settings.on_error == "drop"
        self._results[index] = RewardResult(0.0, correct=False, error=error, dropped=dropped)
        bad = self._bad + len(self._failures)
        if bad > self._settings.max_bad_share * len(self._samples):
            raise RewardError(
                f"reward {self._name}: {bad} of {len(self._samples)} samples got no score"
                f" ({self._kinds()}), and reward.max_bad_share is {self._settings.max_bad_share:g}; the last one"
                f" {outcome.what}\n{self._show(index)}"
            ) from outcome.cause

    def results(self) -> list[RewardResult]:
        """Return one result per sample, in order; log bad samples.

        Raises:
            RewardError: a sample has no outcome.
        """
        results = [result for result in self._results if result is not None]
        if len(results) != len(self._samples):
            raise RewardError(f"reward {self._name}: {self.undecided} of {len(self._samples)} samples were left out")
        if self._failures:
            index, failure = min(self._failures.items())
            logger.warning(
                "reward %s: %d of %d samples got no score (%s) and %s; the first one %s\n%s",
                self._name,
                len(self._failures),
                len(self._samples),
                self._kinds(),
                "are dropped" if self._settings.on_error == "drop" else "count as zero",
                failure.what,
                self._show(index),
            )
        return results

    def _kinds(self) -> str:
        counts = Counter(failure.kind for failure in self._failures.values())
        return ", ".join(f"{kind}: {count}" for kind, count in sorted(counts.items()))

    def _show(self, index: int) -> str:
        sample = self._samples[index]
        return (
            f"  sample {index} of {len(self._samples)}, data source {sample.data_source!r}\n"
            f"  prompt: {_excerpt(sample.prompt)!r}\n"
            f"  response: {_excerpt(sample.response)!r}\n"
            f"  ground truth: {_excerpt(str(sample.ground_truth))!r}"
        )


class PolicyRewardManager(BaseRewardManager):
    """A manager that applies the policy of its settings to a batch; a subclass scores the samples."""

    @property
    def name(self) -> str:
        """Name of the reward, for messages."""
        return reward_name(self.reward)

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        outcomes = Outcomes(self.name, samples, self.settings)
        if samples:
            self.score_all(samples, outcomes)
        return outcomes.results()

    @abstractmethod
    def score_all(self, samples: Sequence[RewardSample], outcomes: Outcomes) -> None:
        """Pass the outcome of every sample to ``outcomes``; there is at least one sample."""


def reward_name(reward: BaseReward) -> str:
    """Return the name of a reward; its class if it has no name."""
    return str(getattr(reward, "name", "") or type(reward).__name__)


def _plain(value: Any) -> Any:
    """Return a value that JSON and pickle can hold: numbers as Python's, containers of such, anything else as text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    try:
        return finite_number("", value, sys.float_info.max)
    except ValueError:
        return str(value)


def _excerpt(text: str) -> str:
    if len(text) <= _EXCERPT:
        return text
    half = _EXCERPT // 2
    return f"{text[:half]} … {text[-half:]}"
