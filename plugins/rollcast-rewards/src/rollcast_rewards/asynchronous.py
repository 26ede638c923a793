"""Asynchronous rewards, with many samples in flight on an event loop in its own thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from queue import Empty, SimpleQueue
from typing import Any

from rollcast.contracts.reward import BaseReward, RewardSample, RewardSettings
from rollcast.errors import RewardError
from rollcast_rewards.policy import Outcome, Outcomes, check_value, describe_error, failure_of, timed_out

__all__ = ["MAX_CONCURRENT", "AsyncScorer", "BatchLoop", "LateBatch", "score_once"]

MAX_CONCURRENT = 32
"""Default number of samples in flight."""
#: A loop that has not cancelled a late sample after this time is blocked by code that does not await.
_GRACE_S = 1.0
#: Shortest wait of a batch that is late because of another one's sample.
_POLL_S = 0.02

Attempt = Callable[[BaseReward, RewardSample], Awaitable[Outcome]]


async def score_once(reward: BaseReward, sample: RewardSample) -> Outcome:
    """Await one sample's reward; exceptions of the reward pass through."""
    value = reward.score(sample)
    return check_value(await value if isinstance(value, Awaitable) else value, sample)


class _Loop:
    """An event loop in a daemon thread, so that a reward that never returns cannot keep the run from ending.

    Args:
        max_concurrent: samples in flight at a time, of all batches.
    """

    def __init__(self, max_concurrent: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.slots = asyncio.Semaphore(max_concurrent)
        self.flights: set[_Flight] = set()
        #: The sample that each task works on.
        self.owners: dict[asyncio.Task[None] | None, tuple[_Flight, int]] = {}
        threading.Thread(target=self._run, name="rollcast-async-reward", daemon=True).start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    def find_blocking(self, limit: float) -> dict[_Flight, list[int]]:
        """Return the late sample whose code blocks the loop; all late samples if no task of ours does."""
        late = {flight: flight.late(limit) for flight in self.flights}
        owner = self.owners.get(asyncio.current_task(self.loop))
        if owner is None:
            return {flight: results for flight, results in late.items() if results}
        flight, index = owner
        return {flight: [index]} if index in late.get(flight, ()) else {}

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
    """The samples of one batch, on one event loop after the other.

    Attributes:
        samples: samples of the batch.
        waiting: indices of samples that no task has started.
        started: start time of each sample in flight, by index.
        done: number of the loop, index and outcome of each sample that ended; None once the scorer is closed.
        leg: number of the batch's current loop; outcomes from earlier loops are ignored.
        tasks: tasks on the current loop.
    """

    def __init__(self, samples: Sequence[RewardSample]) -> None:
        self.samples = samples
        self.waiting = deque(range(len(samples)))
        self.started: dict[int, float] = {}
        self.done: SimpleQueue[tuple[int, int, Outcome] | None] = SimpleQueue()
        self.leg = 0
        self.tasks: list[Future[None]] = []

    def late(self, limit: float) -> list[int]:
        """Return the samples in flight for longer than ``limit`` seconds."""
        now = time.monotonic()
        return [index for index, start in list(self.started.items()) if start + limit <= now]

    def leave(self, timed_out_samples: Sequence[int], outcome: Outcome) -> None:
        """Leave a loop: some samples have their outcome, the others begin again on the next."""
        others = [index for index in list(self.started) if index not in timed_out_samples]
        self.leg += 1
        self.waiting = deque([*others, *self.waiting])
        self.started, self.tasks = {}, []
        for index in timed_out_samples:
            self.done.put((self.leg, index, outcome))


class AsyncScorer:
    """A scorer for asynchronous rewards, with one event loop for all batches; several threads may use it at once.

    The loop is kept between batches, because a reward's clients, such as an HTTP session, are bound to the loop that
    created them.

    Args:
        reward: reward whose ``score`` is awaited.
        settings: time limit of one sample, all tries included.
        max_concurrent: samples in flight at a time.
        attempt: function that scores one sample; by default :func:`score_once`.
        pace: function that returns the seconds to wait before the next sample starts.
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
        #: Held while the loop or its flights change.
        self._lock = threading.Lock()
        self._loop: _Loop | None = None

    def score_all(self, samples: Sequence[RewardSample], outcomes: Outcomes) -> None:
        """Pass the outcome of every sample to ``outcomes``.

        Raises:
            RewardError: a sample ends the batch, or the scorer was closed.
        """
        flight = _Flight(samples)
        with self._lock:
            self._board(flight)
        try:
            while outcomes.undecided:
                try:
                    result = flight.done.get(timeout=self._patience(flight))
                except Empty:
                    self._leave_blocked_loop()
                    continue
                if result is None:
                    raise RewardError(f"reward {self._reward.name}: closed with {outcomes.undecided} samples unscored")
                leg, index, outcome = result
                if leg == flight.leg:
                    flight.started.pop(index, None)
                    outcomes.add(index, outcome)
        finally:
            self._end(flight)

    def close(self) -> None:
        """End the loop, and with it the batches on it; may be called again."""
        with self._lock:
            loop, self._loop = self._loop, None
            if loop is not None:
                for flight in loop.flights:
                    flight.done.put(None)
                loop.stop()

    def _board(self, flight: _Flight) -> None:
        """Start a batch's tasks on the current loop."""
        loop = self._loop = self._loop or _Loop(self._max_concurrent)
        loop.flights.add(flight)
        for _ in range(min(self._max_concurrent, len(flight.waiting))):
            work = self._work(loop, flight, flight.leg)
            flight.tasks.append(asyncio.run_coroutine_threadsafe(work, loop.loop))

    def _end(self, flight: _Flight) -> None:
        """Cancel the remaining tasks of a batch; end the loop if this was the last batch and it ended early."""
        with self._lock:
            left = [task for task in flight.tasks if not task.done()]
            has_failed = bool(flight.started)
            flight.leg += 1
            for task in left:
                task.cancel()
            if self._loop is not None:
                self._loop.flights.discard(flight)
                if has_failed and not self._loop.flights:
                    self._loop.stop()
                    self._loop = None

    def _leave_blocked_loop(self) -> None:
        """Replace a loop that did not cancel a late sample, because code that does not await blocks it."""
        limit = self._limit or 0.0
        with self._lock:
            loop = self._loop
            blocking = loop.find_blocking(limit) if loop is not None else {}
            if loop is None or not blocking:  # it ended in the meantime, or another thread was here before
                return
            self._loop = None
            loop.stop()  # as soon as it is no longer blocked
            for flight in loop.flights:
                flight.leave(blocking.get(flight, ()), timed_out(self._limit))
                self._board(flight)

    async def _work(self, loop: _Loop, flight: _Flight, leg: int) -> None:
        while flight.waiting and flight.leg == leg:
            async with loop.slots:
                if self._pace is not None:
                    await asyncio.sleep(self._pace())
                if not flight.waiting or flight.leg != leg:
                    return
                index = flight.waiting.popleft()
                flight.started[index] = time.monotonic()
                task = asyncio.current_task()
                loop.owners[task] = flight, index
                try:
                    flight.done.put((leg, index, await self._score(flight.samples[index])))
                finally:
                    del loop.owners[task]

    async def _score(self, sample: RewardSample) -> Outcome:
        try:
            async with asyncio.timeout(self._limit) as deadline:
                return await self._attempt(self._reward, sample)
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 -- reported with the sample
            late = isinstance(error, TimeoutError) and deadline.expired()
            return timed_out(self._limit) if late else failure_of(error)

    def _patience(self, flight: _Flight) -> float | None:
        """Return the seconds until the oldest sample in flight must have been cancelled; None without a limit."""
        if self._limit is None:
            return None
        first = min(list(flight.started.values()), default=time.monotonic())
        return max(first + self._limit + _GRACE_S - time.monotonic(), _POLL_S)


class LateBatch(Exception):
    """A batch took longer than its time limit."""


class BatchLoop:
    """An event loop in a daemon thread that awaits what ``score_batch`` returned; several threads may use it at once.

    The loop is kept between batches, because clients are bound to the loop that created them.

    Args:
        max_concurrent: batches in flight at a time.
    """

    def __init__(self, max_concurrent: int) -> None:
        self._max_concurrent = max_concurrent
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(max_concurrent)

    def gather(self, values: Sequence[Any], limit: float | None) -> list[Any]:
        """Return the values, with awaitables replaced by their results; exceptions of the reward pass through.

        Args:
            limit: time limit in seconds, without the time that the batch waits for others.

        Raises:
            LateBatch: the results took longer.
        """
        loop, slots = self._current()
        future = asyncio.run_coroutine_threadsafe(_await_all(values, slots, limit), loop)
        while not wait_for([future], None if limit is None else limit + _GRACE_S).done:
            # The loop itself ends late batches; it cannot if code that does not await blocks it.
            if not _answers(loop):
                future.cancel()
                self._abandon(loop)
                raise LateBatch
        return future.result()

    def close(self) -> None:
        """End the loop; may be called again."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(_stop, loop)

    def _current(self) -> tuple[asyncio.AbstractEventLoop, asyncio.Semaphore]:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._slots = asyncio.Semaphore(self._max_concurrent)
                # A daemon thread, so that a reward that never returns cannot keep the run from ending.
                threading.Thread(target=_run, args=(self._loop,), name="rollcast-reward-batches", daemon=True).start()
            return self._loop, self._slots

    def _abandon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Use another loop from now on; the blocked one ends as soon as its code returns."""
        with self._lock:
            if self._loop is loop:
                self._loop = None
                loop.call_soon_threadsafe(_stop, loop)


async def _await_all(values: Sequence[Any], slots: asyncio.Semaphore, limit: float | None) -> list[Any]:
    collected = list(values)
    places = [place for place, value in enumerate(values) if isinstance(value, Awaitable)]
    async with slots:
        try:
            async with asyncio.timeout(limit) as deadline:
                results = await asyncio.gather(*(_without_exit(values[place]) for place in places))
        except TimeoutError:
            if deadline.expired():
                raise LateBatch from None
            raise
    for place, result in zip(places, results, strict=True):
        collected[place] = result
    return collected


async def _without_exit(value: Awaitable[Any]) -> Any:
    """Return an awaitable's result; an exception that would end the loop's thread becomes an error of the reward."""
    try:
        return await value
    except (SystemExit, KeyboardInterrupt) as error:
        raise RewardError(f"raised {describe_error(error)}") from error


def _answers(loop: asyncio.AbstractEventLoop) -> bool:
    """Return True if the loop runs a callback within the grace time."""
    try:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(_GRACE_S)
    except TimeoutError:
        return False
    return True


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the loop's tasks and stop it once they have ended."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    asyncio.gather(*tasks, return_exceptions=True).add_done_callback(lambda _: loop.stop())
