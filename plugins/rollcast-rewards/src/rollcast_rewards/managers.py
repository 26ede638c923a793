"""The reward manager ``naive``: scores samples where it is called, and refuses bad scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rollcast.contracts.reward import BaseReward, BaseRewardManager, RewardResult, RewardSample
from rollcast.errors import RewardError

__all__ = ["NaiveRewardManager"]

_EXCERPT = 200


class NaiveRewardManager(BaseRewardManager):
    """Scores a batch in this process, in order, and stops at the first bad score.

    A reward that only scores single samples is called one by one, so that a failure names its
    sample; one that overrides ``score_batch`` gets the whole batch.
    """

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """One finite result a sample, in order.

        Raises:
            RewardError: the reward raised (its exception is chained), gave something that is not
                a finite number, or the wrong number of scores; shows reward and sample.
        """
        scores = self._score(samples)
        if len(scores) != len(samples):
            raise RewardError(f"reward {self._name}: {len(samples)} samples were given, {len(scores)} scores came back")
        return [self._check(score, index, samples) for index, score in enumerate(scores)]

    @property
    def _name(self) -> str:
        return str(getattr(self.reward, "name", "") or type(self.reward).__name__)

    def _score(self, samples: Sequence[RewardSample]) -> list[Any]:
        if type(self.reward).score_batch is BaseReward.score_batch:
            return [self._score_one(index, samples) for index in range(len(samples))]
        try:
            return list(self.reward.score_batch(samples))
        except Exception as error:
            raise RewardError(
                f"reward {self._name} failed on a batch of {len(samples)} samples: {type(error).__name__}: {error}"
            ) from error

    def _score_one(self, index: int, samples: Sequence[RewardSample]) -> Any:
        try:
            return self.reward.score(samples[index])
        except Exception as error:
            raise self._error(f"failed: {type(error).__name__}: {error}", index, samples) from error

    def _check(self, value: Any, index: int, samples: Sequence[RewardSample]) -> RewardResult:
        result = value if isinstance(value, RewardResult) else RewardResult(value)
        for name, item in {"score": result.score, **result.extra}.items():
            number = _as_number(item)
            if number is None:
                what = f"gave {name} = {_excerpt(repr(item))}, which is not a number ({type(item).__name__})"
                raise self._error(what, index, samples)
            if not math.isfinite(number):
                raise self._error(f"gave {name} = {number}, which is not finite", index, samples)
        extra = {name: float(item) for name, item in result.extra.items()}
        return RewardResult(float(result.score), result.correct, extra)

    def _error(self, what: str, index: int, samples: Sequence[RewardSample]) -> RewardError:
        sample = samples[index]
        return RewardError(
            f"reward {self._name} {what}\n"
            f"  sample {index} of {len(samples)}, data source {sample.data_source!r}\n"
            f"  prompt: {_excerpt(sample.prompt)!r}\n"
            f"  response: {_excerpt(sample.response)!r}\n"
            f"  ground truth: {_excerpt(str(sample.ground_truth))!r}"
        )


def _as_number(value: Any) -> float | None:
    # Whatever can stand for one number (numpy's and torch's scalars too); float() alone would parse strings.
    if not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _excerpt(text: str) -> str:
    if len(text) <= _EXCERPT:
        return text
    half = _EXCERPT // 2
    return f"{text[:half]} … {text[-half:]}"
