"""Asynchronous rewards: many samples in flight on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from queue import Empty, SimpleQueue

from rollcast.contracts.reward import BaseReward, RewardSample, RewardSettings
from rollcast_rewards.policy import Judge, Outcome, check_value, failure_of, timed_out

__all__ = ["MAX_CONCURRENT", "AsyncScorer", "score_once"]

MAX_CONCURRENT = 32
"""Samples in flight where nothing else is asked for."""
#: A loop that has not cancelled a late sample after this time is blocked by code that does not await.
_GRACE_S = 1.0

Attempt = Callable[[BaseReward, RewardSample], Awaitable[Outcome]]


async def score_once(reward: BaseReward, sample: RewardSample) -> Outcome:
    """Await one sample's reward; exceptions of the reward pass through."""
    value = reward.score(sample)
    return check_value(await value if isinstance(value, Awaitable) else value, sample)


class _Loop:
    """An event loop in a daemon thread, so that a reward that never returns cannot keep the run from ending."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="rollcast-async-reward", daemon=True).start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    def stop(self) -> None:
        """Cancel all tasks, then end the thread."""
        asyncio.run_coroutine_threadsafe(self._cancel(), self.loop)

    async def _cancel(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self.loop.stop()


class _Flight:
    """The samples of one batch on one event loop.

    Attributes:
        samples: samples of the batch.
        waiting: indices that no task has taken.
        started: start time of each sample in flight, by index.
        owners: index that each task works on.
        done: indices with their outcomes.
        is_over: tasks stop before the next sample.
    """

    def __init__(self, samples: Sequence[RewardSample], waiting: Iterable[int]) -> None:
        self.samples = samples
        self.waiting = deque(waiting)
        self.started: dict[int, float] = {}
        self.owners: dict[asyncio.Task[None] | None, int] = {}
        self.done: SimpleQueue[tuple[int, Outcome]] = SimpleQueue()
        self.is_over = False

    def find_blocking(self, loop: asyncio.AbstractEventLoop, limit: float) -> list[int]:
        """Return the sample whose code blocks the loop; all late samples if its task is not one of ours."""
        owner = self.owners.get(asyncio.current_task(loop))
        late = [index for index, start in list(self.started.items()) if start + limit <= time.monotonic()]
        return [owner] if owner in self.started else late

    def has_ended(self, index: int) -> None:
        """Remove a sample that has an outcome."""
        self.started.pop(index, None)


class AsyncScorer:
    """A scorer for asynchronous rewards, with one event loop for all batches.

    The loop is kept because clients of a reward (an HTTP session, say) belong to the loop they were made on.

    Args:
        reward: reward whose ``score`` is awaited.
        settings: time limit of one sample, all tries included.
        max_concurrent: samples in flight at a time.
        attempt: scores one sample; by default :func:`score_once`.
        pace: seconds to wait before the next sample starts.
    """

    def __init__(
        self,
        reward: BaseReward,
        settings: RewardSettings,
        max_concurrent: int = MAX_CONCURRENT,
        attempt: Attempt = score_once,
        pace: Callable[[], float] | None = None,
    ) -> None:
        self._reward = reward
        self._limit = settings.timeout_s
        self._max_concurrent = max_concurrent
        self._attempt = attempt
        self._pace = pace
        self._loop: _Loop | None = None

    def score_all(self, samples: Sequence[RewardSample], judge: Judge) -> None:
        """Pass the outcome of every sample to the judge."""
        flight = self._start(_Flight(samples, range(len(samples))))
        try:
            while judge.undecided:
                try:
                    finished = [flight.done.get(timeout=self._patience(flight))]
                except Empty:
                    finished, flight = self._leave_loop(flight)
                for index, outcome in finished:
                    flight.has_ended(index)
                    judge.add(index, outcome)
        except BaseException:
            flight.is_over = True
            self.close()  # samples in flight belong to a batch that is over
            raise

    def close(self) -> None:
        """End the loop; may be called again."""
        if self._loop is not None:
            self._loop.stop()
            self._loop = None

    def _start(self, flight: _Flight) -> _Flight:
        self._loop = self._loop or _Loop()
        for _ in range(min(self._max_concurrent, len(flight.waiting))):
            asyncio.run_coroutine_threadsafe(self._work(flight), self._loop.loop)
        return flight

    def _leave_loop(self, flight: _Flight) -> tuple[list[tuple[int, Outcome]], _Flight]:
        """Replace a loop that is blocked by code that does not await: it did not cancel a late sample."""
        limit = self._limit or 0.0
        blocking = flight.find_blocking(self._loop.loop, limit) if self._loop is not None else []
        if not blocking:  # it ended in the meantime
            return [], flight
        flight.is_over = True
        self.close()  # ends the loop as soon as it is no longer blocked
        others = [index for index in list(flight.started) if index not in blocking]
        following = self._start(_Flight(flight.samples, [*others, *flight.waiting]))
        return [(index, timed_out(self._limit)) for index in blocking], following

    async def _work(self, flight: _Flight) -> None:
        while flight.waiting and not flight.is_over:
            if self._pace is not None:
                await asyncio.sleep(self._pace())
            if not flight.waiting or flight.is_over:
                return
            index = flight.waiting.popleft()
            flight.owners[asyncio.current_task()] = index
            flight.started[index] = time.monotonic()
            flight.done.put((index, await self._score(flight.samples[index])))

    async def _score(self, sample: RewardSample) -> Outcome:
        try:
            async with asyncio.timeout(self._limit) as deadline:
                return await self._attempt(self._reward, sample)
        except Exception as error:  # noqa: BLE001 -- the error is the sample's and is reported with it
            late = isinstance(error, TimeoutError) and deadline.expired()
            return timed_out(self._limit) if late else failure_of(error)

    def _patience(self, flight: _Flight) -> float | None:
        """Return the seconds until the oldest sample in flight must have been cancelled; None without a limit."""
        if self._limit is None:
            return None
        first = min(list(flight.started.values()), default=time.monotonic())
        return max(first + self._limit + _GRACE_S - time.monotonic(), 1e-3)
