"""The reward manager ``remote``: concurrent scoring, for rewards that wait for a network."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from rollcast.contracts.reward import BaseReward, RewardSample, RewardSettings
from rollcast.errors import ConfigError
from rollcast_rewards.asynchronous import AsyncScorer, score_once
from rollcast_rewards.policy import Outcome, Outcomes, PolicyRewardManager, check_value, failure_of, timed_out

__all__ = ["RateLimit", "RemoteRewardManager", "TransientError"]

_LONGEST_PAUSE_S = 30.0


class TransientError(ConnectionError):
    """A request failed, and a retry may succeed.

    Attributes:
        retry_after_s: pause in seconds that the server asks for; None if it does not ask.
    """

    retry_after_s: float | None = None


class RateLimit:
    """A rate limit that spaces calls evenly.

    Args:
        per_minute: calls per minute; None for no limit.
    """

    def __init__(self, per_minute: float | None) -> None:
        self._interval = 60.0 / per_minute if per_minute else 0.0
        self._next = 0.0
        self._lock = threading.Lock()

    def reserve(self) -> float:
        """Reserve the next call; return the seconds until it may start."""
        with self._lock:
            now = time.monotonic()
            place = max(self._next, now)
            self._next = place + self._interval
            return place - now


class _Batch:
    """A batch that the threads work on."""

    def __init__(self, samples: Sequence[RewardSample]) -> None:
        self.samples = samples
        self.waiting = deque(range(len(samples)))
        self.started: dict[int, float] = {}
        self.done: SimpleQueue[tuple[int, Outcome]] = SimpleQueue()
        self.over = threading.Event()

    def take(self) -> int | None:
        """Return the next sample that no thread has taken; None if there is none."""
        try:
            return self.waiting.popleft()
        except IndexError:
            return None


class RemoteRewardManager(PolicyRewardManager):
    """A manager that scores up to ``max_concurrent`` samples at once.

    Samples are scored in threads, or on an event loop if the reward is asynchronous.
    A reward that raises :class:`TransientError`, ``ConnectionError`` or ``TimeoutError`` is retried.
    ``reward.timeout_s`` limits a sample with all its retries; a thread that is still busy with a sample after
    that time is abandoned and replaced.

    Args:
        reward, settings: see :class:`BaseRewardManager`; the reward is called from several threads.
        max_concurrent: maximum number of concurrent calls.
        max_rpm: calls per minute, retries included; None for no limit.
        max_retries: retries per sample.
        backoff_s: pause before the first retry in seconds; it doubles with each retry, up to 30 s.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(
        self,
        reward: BaseReward,
        settings: RewardSettings | None = None,
        max_concurrent: int = 32,
        max_rpm: float | None = None,
        max_retries: int = 3,
        backoff_s: float = 0.5,
    ) -> None:
        super().__init__(reward, settings)
        for key, value, least in (
            ("max_concurrent", max_concurrent, 1),
            ("max_rpm", 1 if max_rpm is None else max_rpm, 1e-3),
            ("max_retries", max_retries, 0),
            ("backoff_s", backoff_s, 0),
        ):
            if value < least:
                raise ConfigError(f"reward.reward_manager_kwargs.{key} is {value}; it must be at least {least}")
        self._limit = RateLimit(max_rpm)
        self._max_concurrent = max_concurrent
        self._max_retries = max_retries
        self._backoff_s = backoff_s
        self._scorer: AsyncScorer | None = None
        if reward.is_async:
            self._scorer = AsyncScorer(reward, self.settings, max_concurrent, self._attempt, self._limit.reserve)

    @property
    def is_concurrent(self) -> bool:
        return self._scorer is not None

    def close(self) -> None:
        if self._scorer is not None:
            self._scorer.close()

    async def _attempt(self, reward: BaseReward, sample: RewardSample) -> Outcome:
        """Await the reward of a sample; retry after transient errors."""
        pause, left = self._backoff_s, self._max_retries
        while True:
            try:
                return await score_once(reward, sample)
            except (ConnectionError, TimeoutError) as error:
                if not left:
                    raise
                asked = getattr(error, "retry_after_s", None)
                await asyncio.sleep(max(pause if asked is None else asked, self._limit.reserve()))
                pause, left = min(pause * 2, _LONGEST_PAUSE_S), left - 1

    def score_all(self, samples: Sequence[RewardSample], outcomes: Outcomes) -> None:
        if self._scorer is not None:
            self._scorer.score_all(samples, outcomes)
            return
        batch = _Batch(samples)
        for _ in range(min(self._max_concurrent, len(samples))):
            self._start_thread(batch)
        decided: set[int] = set()
        try:
            while outcomes.undecided:
                try:
                    finished = [batch.done.get(timeout=self._until_next_deadline(batch))]
                except Empty:
                    finished = [(index, timed_out(self.settings.timeout_s)) for index in self._late(batch)]
                    for _ in finished:
                        self._start_thread(batch)
                for index, outcome in finished:
                    batch.started.pop(index, None)
                    if index not in decided:
                        decided.add(index)
                        outcomes.add(index, outcome)
        finally:
            batch.over.set()

    def _until_next_deadline(self, batch: _Batch) -> float | None:
        if self.settings.timeout_s is None:
            return None
        first = min(list(batch.started.values()), default=time.monotonic())
        return max(first + self.settings.timeout_s - time.monotonic(), 1e-3)

    def _late(self, batch: _Batch) -> list[int]:
        limit, now = self.settings.timeout_s, time.monotonic()
        return [index for index, start in list(batch.started.items()) if limit is not None and start + limit <= now]

    def _start_thread(self, batch: _Batch) -> None:
        # A daemon thread, so that a call that never returns cannot keep the run from ending.
        threading.Thread(target=self._work, args=(batch,), name="rollcast-remote-reward", daemon=True).start()

    def _work(self, batch: _Batch) -> None:
        while not batch.over.is_set() and (index := batch.take()) is not None:
            if batch.over.wait(self._limit.reserve()):
                return
            start = batch.started[index] = time.monotonic()
            batch.done.put((index, self._score(batch, index)))
            if self.settings.timeout_s is not None and time.monotonic() - start > self.settings.timeout_s:
                return  # another thread has replaced this one

    def _score(self, batch: _Batch, index: int) -> Outcome:
        pause = self._backoff_s
        for left in range(self._max_retries, -1, -1):
            try:
                return check_value(self.reward.score(batch.samples[index]), batch.samples[index])
            except (ConnectionError, TimeoutError) as error:
                asked = getattr(error, "retry_after_s", None)
                failure = failure_of(error)
                if not left or batch.over.wait(max(pause if asked is None else asked, self._limit.reserve())):
                    return failure
                pause = min(pause * 2, _LONGEST_PAUSE_S)
            except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 -- reported as the sample's error
                return failure_of(error)
        return failure
