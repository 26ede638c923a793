"""The reward manager ``dapo``: another manager's scores, less a penalty for responses near the length limit."""

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
        enable: whether there is one.
        len: the last so many tokens before the hard limit, in which the penalty grows.
        penalty_factor: the penalty at the hard limit; not negative.
    """

    enable: bool = True
    len: int = 0
    penalty_factor: float = 1.0

    def check(self, max_response_length: int | None) -> int:
        """The hard limit that the buffer stands before.

        Raises:
            ConfigError: the buffer is empty or longer than a response may be, or the limit is not known.
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
    """What is added to the score of a response of ``length`` tokens: from 0 down to ``-penalty_factor``.

    With the hard limit ``M`` and a buffer of ``L`` tokens it is 0 up to ``M - L`` tokens, and then
    ``-(length - (M - L)) / L · penalty_factor``.
    """
    beyond = length - (max_response_length - buffer.len)
    return -max(beyond, 0) / buffer.len * buffer.penalty_factor


class DapoRewardManager(BaseRewardManager):
    """Takes away up to ``penalty_factor`` from the score of a response that comes near the length limit.

    Whether an answer counts as correct does not change. The penalty is the extra number
    ``overlong_penalty``, with its sign. Bad samples get none.

    Args:
        reward, settings: as in :class:`BaseRewardManager`.
        overlong_buffer: the keys of :class:`OverlongBuffer`; None for no penalty.
        inner: name of the manager that scores.
        inner_kwargs: its options.

    Raises:
        ConfigError: a key does not exist or is out of its range.
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

    def close(self) -> None:
        self._inner.close()
