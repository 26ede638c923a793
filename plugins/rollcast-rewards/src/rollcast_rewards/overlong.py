"""The reward manager ``dapo``: scores of another manager minus a penalty for responses near the length limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollcast.contracts.reward import (
    BaseReward,
    BaseRewardManager,
    RewardResult,
    RewardSample,
    RewardSettings,
    build_reward_manager,
)
from rollcast.errors import ConfigError

__all__ = ["DapoRewardManager", "OverlongBuffer", "overlong_penalty"]

_KEY = "reward.reward_manager_kwargs.overlong_buffer"


@dataclass(frozen=True)
class OverlongBuffer:
    """The soft limit of DAPO (arXiv 2503.14476, equation 13).

    Attributes:
        enable: True to apply the penalty.
        len: number of tokens before the hard limit over which the penalty grows.
        penalty_factor: penalty at the hard limit; not negative.
    """

    enable: bool = True
    len: int = 0
    penalty_factor: float = 1.0

    def check(self, max_response_length: int | None) -> int:
        """Return the hard limit that the buffer precedes.

        Raises:
            ConfigError: the buffer is empty or longer than the longest response, or the limit is not known.
        """
        if max_response_length is None:
            raise ConfigError(f"{_KEY}.enable needs the run's limit of a response, data.max_response_length")
        if not 0 < self.len <= max_response_length:
            raise ConfigError(
                f"{_KEY}.len is {self.len}; it has to be from 1 to data.max_response_length = {max_response_length}"
            )
        if self.penalty_factor < 0:
            raise ConfigError(f"{_KEY}.penalty_factor is {self.penalty_factor}; it is subtracted, and not negative")
        return max_response_length


def overlong_penalty(length: int, max_response_length: int, buffer: OverlongBuffer) -> float:
    """Return the number added to the score of a response of ``length`` tokens, from 0 to ``-penalty_factor``.

    With the hard limit ``M`` and a buffer of ``L`` tokens the number is 0 up to ``M - L`` tokens, and then
    ``-(length - (M - L)) / L · penalty_factor``.
    """
    beyond = length - (max_response_length - buffer.len)
    return -max(beyond, 0) / buffer.len * buffer.penalty_factor


class DapoRewardManager(BaseRewardManager):
    """A manager that subtracts up to ``penalty_factor`` from the scores of responses near the length limit.

    The penalty does not change whether an answer counts as correct. The extra number ``overlong_penalty``
    has the penalty with its sign. Bad samples get no penalty.

    Args:
        reward, settings: see :class:`BaseRewardManager`.
        overlong_buffer: keys of :class:`OverlongBuffer`; None for no penalty.
        inner: name of the manager that scores.
        inner_kwargs: options of that manager.

    Raises:
        ConfigError: a key does not exist, or a value is out of range.
    """

    def __init__(
        self,
        reward: BaseReward,
        settings: RewardSettings | None = None,
        overlong_buffer: Mapping[str, Any] | None = None,
        inner: str = "naive",
        inner_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(reward, settings)
        try:
            self._buffer = OverlongBuffer(**(overlong_buffer or {"enable": False}))
        except TypeError as error:
            valid = ", ".join(OverlongBuffer.__dataclass_fields__)
            raise ConfigError(f"{_KEY} has the keys {', '.join(overlong_buffer or ())}; valid: {valid}") from error
        self._limit = self._buffer.check(self.settings.max_response_length) if self._buffer.enable else 0
        self._inner = build_reward_manager(inner, reward, self.settings, inner_kwargs)

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        results = self._inner(samples)
        if not self._buffer.enable:
            return results
        return [self._penalize(result, sample) for result, sample in zip(results, samples, strict=True)]

    def _penalize(self, result: RewardResult, sample: RewardSample) -> RewardResult:
        if result.error:
            return result
        penalty = overlong_penalty(len(sample.response_ids), self._limit, self._buffer)
        correct = result.score >= self.reward.max_score if result.correct is None else result.correct
        extra = {**result.extra, "overlong_penalty": penalty}
        return replace(result, score=result.score + penalty, correct=correct, extra=extra)

    @property
    def is_concurrent(self) -> bool:
        return self._inner.is_concurrent

    def close(self) -> None:
        self._inner.close()
