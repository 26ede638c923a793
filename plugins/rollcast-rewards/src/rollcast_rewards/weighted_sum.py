"""The reward ``weighted_sum``, which adds up several rewards."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from rollcast.contracts.reward import MAX_REWARD, BaseReward, Judge, RewardResult, RewardSample, build_reward
from rollcast.errors import ConfigError
from rollcast_rewards.policy import Failure, check_value

__all__ = ["WeightedSum", "is_weight"]

_KEY = "reward.reward_kwargs.rewards"
_FIELDS = ("name", "weight", "reward_kwargs")


class WeightedSum(BaseReward):
    """The weighted sum of the scores of several rewards.

    The first reward decides whether a sample is correct. The score of each reward, without its weight, is an
    extra number under the reward's name (``gsm8k``, and ``gsm8k_2`` for its second use); the reward's extra
    numbers are ``gsm8k/<name>``. Scores per token or turn are weighted and added too. The sum is asynchronous if
    one of the rewards is; the asynchronous rewards of a sample are awaited together.

    Args:
        rewards: mappings with ``name``, ``weight`` (1 if not given) and ``reward_kwargs``.

    Raises:
        ConfigError: there are no rewards, or one has an unknown key, a wrong weight or an unknown option.
        PluginError: a reward does not exist or does not load.
    """

    def __init__(self, rewards: Sequence[Mapping[str, Any]]) -> None:
        if not rewards:
            raise ConfigError(f"{_KEY} is empty; give at least one mapping with the keys {', '.join(_FIELDS)}")
        self._parts: dict[str, tuple[float, BaseReward]] = {}
        seen: Counter[str] = Counter()
        for place, entry in enumerate(rewards):
            label, weight, reward = _read(entry, f"{_KEY}[{place}]")
            seen[label] += 1
            self._parts[label if seen[label] == 1 else f"{label}_{seen[label]}"] = weight, reward
        self.max_score = sum(weight * reward.max_score for weight, reward in self._parts.values() if weight > 0)

    @property
    def is_async(self) -> bool:
        return any(reward.is_async for _, reward in self._parts.values())

    @property
    def uses_judge(self) -> bool:
        return any(reward.uses_judge for _, reward in self._parts.values())

    def bind_judge(self, judge: Judge) -> None:
        super().bind_judge(judge)
        for _, reward in self._parts.values():
            reward.bind_judge(judge)

    def close(self) -> None:
        """Close every reward, also after one that failed; raises the first error."""
        with ExitStack() as stack:
            for _, reward in self._parts.values():
                stack.callback(reward.close)

    def score(self, sample: RewardSample) -> RewardResult | Awaitable[RewardResult]:
        """Return the sum; an awaitable if a reward is asynchronous.

        Raises:
            ValueError: a reward did not return a finite number. A reward's own exceptions pass through.
        """
        if self.is_async:
            return self._score_async(sample)
        return self._add([reward.score(sample) for _, reward in self._parts.values()], sample)

    async def _score_async(self, sample: RewardSample) -> RewardResult:
        values: list[Any] = [reward.score(sample) for _, reward in self._parts.values()]
        places = [place for place, value in enumerate(values) if isinstance(value, Awaitable)]
        awaited = await asyncio.gather(*(values[place] for place in places))
        for place, value in zip(places, awaited, strict=True):
            values[place] = value
        return self._add(values, sample)

    def _add(self, values: Iterable[Any], sample: RewardSample) -> RewardResult:
        total, extra, correct = 0.0, dict[str, float | None](), None
        token_scores: list[float] | None = None
        for place, ((label, (weight, reward)), value) in enumerate(zip(self._parts.items(), values, strict=True)):
            result = check_value(value, sample)
            if isinstance(result, Failure):
                raise ValueError(f"{label} {result.what}")
            total += weight * result.score
            if result.token_scores is not None:
                sums = token_scores or [0.0] * len(result.token_scores)
                token_scores = [old + weight * new for old, new in zip(sums, result.token_scores, strict=True)]
            extra |= {label: result.score} | {f"{label}/{name}": value for name, value in result.extra.items()}
            if place == 0:
                correct = result.score >= reward.max_score if result.correct is None else result.correct
        return RewardResult(total, correct, extra, token_scores=token_scores)


def is_weight(value: Any) -> bool:
    """Return True if a value of a config is a finite number that a score can be multiplied by."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_REWARD


def _read(entry: Mapping[str, Any], key: str) -> tuple[str, float, BaseReward]:
    if not isinstance(entry, Mapping) or "name" not in entry or set(entry) - set(_FIELDS):
        raise ConfigError(
            f"{key} is {entry!r}; it has to be a mapping with name, and optionally weight and reward_kwargs"
        )
    weight = entry.get("weight", 1.0)
    if not is_weight(weight):
        raise ConfigError(f"{key}.weight is {weight!r}; it has to be a finite number")
    try:
        return str(entry["name"]), float(weight), build_reward(str(entry["name"]), entry.get("reward_kwargs"))
    except TypeError as error:
        raise ConfigError(f"{key}.reward_kwargs do not fit reward {entry['name']!r}: {error}") from error
