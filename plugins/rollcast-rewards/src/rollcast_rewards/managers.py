"""The reward managers ``naive`` and ``batch``, which score in the caller's process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollcast.contracts.reward import BaseReward, RewardSample, RewardSettings
from rollcast.errors import ConfigError, RewardError
from rollcast_rewards.alarm import Alarm, TimeUp
from rollcast_rewards.policy import Failure, Judge, Outcome, PolicyRewardManager, check_value, failure_of

__all__ = ["BatchRewardManager", "NaiveRewardManager"]


class NaiveRewardManager(PolicyRewardManager):
    """Scores a batch in this process, one sample after the other.

    A reward that overrides ``score_batch`` gets the whole batch, as with :class:`BatchRewardManager`.
    The time limit is that of :class:`Alarm`: it ends Python code that hangs or sleeps, not C code;
    nothing limits memory. ``prime`` does both.
    """

    def score_all(self, samples: Sequence[RewardSample], judge: Judge) -> None:
        with Alarm(self.settings.timeout_s) as alarm:
            if type(self.reward).score_batch is not BaseReward.score_batch:
                score_in_batches(self.reward, samples, judge, alarm, self.settings.timeout_s, len(samples))
                return
            for index, sample in enumerate(samples):
                try:
                    outcome = check_value(alarm.call(self.reward.score, sample))
                except TimeUp:
                    alarm.disarm()
                    outcome = timed_out(self.settings.timeout_s)
                except Exception as error:  # noqa: BLE001 -- it is the sample's, and told of with it
                    outcome = failure_of(error)
                judge.add(index, outcome)


class BatchRewardManager(PolicyRewardManager):
    """Hands the reward's ``score_batch`` whole batches, for rewards that are cheaper that way.

    Where a batch raises, its halves are tried, and theirs, until the sample is found whose error it
    is. ``reward.timeout_s`` is the limit of one call; all samples of a call that takes longer are bad.

    Args:
        reward, settings: as in :class:`BaseRewardManager`.
        batch_size: samples a call; None for all at once.

    Raises:
        ConfigError: ``batch_size`` is not positive.
    """

    def __init__(
        self, reward: BaseReward, settings: RewardSettings | None = None, batch_size: int | None = None
    ) -> None:
        super().__init__(reward, settings)
        if batch_size is not None and batch_size < 1:
            raise ConfigError(f"reward.reward_manager_kwargs.batch_size is {batch_size}; it must be at least 1")
        self._batch_size = batch_size

    def score_all(self, samples: Sequence[RewardSample], judge: Judge) -> None:
        limit = self.settings.timeout_s
        with Alarm(limit) as alarm:
            score_in_batches(self.reward, samples, judge, alarm, limit, self._batch_size or len(samples))


def timed_out(seconds: float | None, what: str = "") -> Failure:
    """The failure of a sample that took too long."""
    return Failure("timeout", f"took longer than reward.timeout_s = {seconds:g} s{what}" if seconds else "hung")


def score_in_batches(
    reward: BaseReward, samples: Sequence[RewardSample], judge: Judge, alarm: Alarm, limit: float | None, size: int
) -> None:
    """Score by ``reward.score_batch``, ``size`` samples a call, and find the bad samples of a call that raises.

    Raises:
        RewardError: a call gave the wrong number of scores, or the judge's.
    """
    name = type(reward).__name__ if not reward.name else reward.name
    waiting = [range(start, min(start + size, len(samples))) for start in range(0, len(samples), size)][::-1]
    while waiting:
        indices = waiting.pop()
        part = [samples[index] for index in indices]
        outcomes: list[Outcome]
        try:
            values: list[Any] = list(alarm.call(reward.score_batch, part))
        except TimeUp:
            alarm.disarm()
            failure = timed_out(limit, f" (a batch of {len(part)})" if len(part) > 1 else "")
            outcomes = [failure] * len(part)
        except Exception as error:  # noqa: BLE001 -- it is found out whose it is
            if len(part) > 1:
                middle = len(indices) // 2
                waiting += [indices[middle:], indices[:middle]]
                continue
            outcomes = [failure_of(error)]
        else:
            if len(values) != len(part):
                raise RewardError(f"reward {name}: {len(part)} samples were given, {len(values)} scores came back")
            outcomes = [check_value(value) for value in values]
        for index, outcome in zip(indices, outcomes, strict=True):
            judge.add(index, outcome)
