"""The reward managers ``naive`` and ``batch``, which score in the caller's process."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from rollcast.contracts.reward import BaseReward, RewardSample, RewardSettings
from rollcast.errors import ConfigError, RewardError
from rollcast_rewards.alarm import Alarm, TimeUp
from rollcast_rewards.asynchronous import MAX_CONCURRENT, AsyncScorer, BatchLoop, LateBatch
from rollcast_rewards.policy import Outcome, Outcomes, PolicyRewardManager, check_value, failure_of, timed_out

__all__ = ["BatchRewardManager", "NaiveRewardManager"]


class _InProcessManager(PolicyRewardManager):
    """A manager in this process, which awaits an asynchronous reward for many samples at once.

    Args:
        reward, settings: see :class:`BaseRewardManager`.
        max_concurrent: samples of an asynchronous reward in flight at a time; batches, if it scores whole batches.

    Raises:
        ConfigError: ``max_concurrent`` is not positive.
    """

    def __init__(
        self, reward: BaseReward, settings: RewardSettings | None = None, max_concurrent: int = MAX_CONCURRENT
    ) -> None:
        super().__init__(reward, settings)
        if max_concurrent < 1:
            raise ConfigError(f"reward.reward_manager_kwargs.max_concurrent is {max_concurrent}; it must be at least 1")
        self._scorer: AsyncScorer | None = None
        #: Awaits what ``score_batch`` returns; None if it returns values.
        self._batch_loop: BatchLoop | None = None
        if reward.is_async and reward.scores_batches:
            self._batch_loop = BatchLoop(max_concurrent)
        elif reward.is_async:
            self._scorer = AsyncScorer(reward, self.settings, max_concurrent)

    def score_all(self, samples: Sequence[RewardSample], outcomes: Outcomes) -> None:
        if self._scorer is not None:
            self._scorer.score_all(samples, outcomes)
        else:
            self.score_in_turn(samples, outcomes)

    @abstractmethod
    def score_in_turn(self, samples: Sequence[RewardSample], outcomes: Outcomes) -> None:
        """Pass the outcome of every sample to ``outcomes``, for a reward that is synchronous or scores batches."""

    @property
    def is_concurrent(self) -> bool:
        return self._scorer is not None or self._batch_loop is not None

    def score_in_batches(self, samples: Sequence[RewardSample], outcomes: Outcomes, alarm: Alarm, size: int) -> None:
        """Score by the reward's ``score_batch``, ``size`` samples per call; find the bad samples of a call that raises.

        Raises:
            RewardError: a call returned the wrong number of scores, or the policy stops the batch.
        """
        limit = self.settings.timeout_s
        waiting = [range(start, min(start + size, len(samples))) for start in range(0, len(samples), size)][::-1]
        while waiting:
            indices = waiting.pop()
            part = [samples[index] for index in indices]
            checked: list[Outcome]
            try:
                values: list[Any] = list(alarm.call(self.reward.score_batch, part))
                if self._batch_loop is not None:
                    values = self._batch_loop.gather(values, limit)
            except (TimeUp, LateBatch):
                alarm.disarm()
                failure = timed_out(limit, f" (a batch of {len(part)})" if len(part) > 1 else "")
                checked = [failure] * len(part)
            except (Exception, SystemExit) as error:  # noqa: BLE001 -- the bad sample is searched for below
                if len(part) > 1:
                    middle = len(indices) // 2
                    waiting += [indices[middle:], indices[:middle]]
                    continue
                checked = [failure_of(error)]
            else:
                if len(values) != len(part):
                    raise RewardError(
                        f"reward {self.name}: {len(part)} samples were given, {len(values)} scores came back"
                    )
                checked = [check_value(value, sample) for value, sample in zip(values, part, strict=True)]
            for index, outcome in zip(indices, checked, strict=True):
                outcomes.add(index, outcome)

    def close(self) -> None:
        if self._scorer is not None:
            self._scorer.close()
        if self._batch_loop is not None:
            self._batch_loop.close()


class NaiveRewardManager(_InProcessManager):
    """A manager that scores in this process, one sample after the other; many at once if the reward is asynchronous.

    A reward that overrides ``score_batch`` receives the whole batch, as with :class:`BatchRewardManager`.
    The time limit is that of :class:`Alarm`, which ends Python code that hangs or sleeps, but not C code;
    memory has no limit. ``prime`` limits both.
    """

    def score_in_turn(self, samples: Sequence[RewardSample], outcomes: Outcomes) -> None:
        with Alarm(self.settings.timeout_s) as alarm:
            if self.reward.scores_batches:
                self.score_in_batches(samples, outcomes, alarm, len(samples))
                return
            for index, sample in enumerate(samples):
                try:
                    outcome = check_value(alarm.call(self.reward.score, sample), sample)
                except TimeUp:
                    alarm.disarm()
                    outcome = timed_out(self.settings.timeout_s)
                except (Exception, SystemExit) as error:  # noqa: BLE001 -- reported as the sample's error
                    outcome = failure_of(error)
                outcomes.add(index, outcome)


class BatchRewardManager(_InProcessManager):
    """A manager that calls the reward's ``score_batch``, for rewards that are faster on whole batches.

    A batch that raises is bisected until the sample is found that causes the error. ``reward.timeout_s`` is
    the limit of one call; all samples of a call that takes longer are bad.

    Args:
        reward, settings: see :class:`BaseRewardManager`.
        batch_size: samples per call; None for all at once.
        max_concurrent: samples in flight for a reward whose ``score`` is asynchronous; it gets them one by one. Calls
            in flight for a reward that scores batches and is asynchronous.

    Raises:
        ConfigError: ``batch_size`` or ``max_concurrent`` is not positive.
    """

    def __init__(
        self,
        reward: BaseReward,
        settings: RewardSettings | None = None,
        batch_size: int | None = None,
        max_concurrent: int = MAX_CONCURRENT,
    ) -> None:
        super().__init__(reward, settings, max_concurrent)
        if batch_size is not None and batch_size < 1:
            raise ConfigError(f"reward.reward_manager_kwargs.batch_size is {batch_size}; it must be at least 1")
        self._batch_size = batch_size

    def score_in_turn(self, samples: Sequence[RewardSample], outcomes: Outcomes) -> None:
        with Alarm(self.settings.timeout_s) as alarm:
            self.score_in_batches(samples, outcomes, alarm, self._batch_size or len(samples))
