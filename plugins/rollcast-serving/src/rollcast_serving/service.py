"""The rollout service: groups of rollouts that start, end and wait while a trainer trains.

:class:`GroupQueue` is the bookkeeping, without clock or threads, so that a simulation can drive it.
:class:`RolloutService` runs groups in an event loop. A trainer submits tasks, takes finished groups, and publishes each
new version of the weights; the admission decides what starts and what is taken.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from rollcast_serving.contracts.admission import AdmissionView, BaseAdmission, StartedGroup

__all__ = ["GroupQueue", "QueueLoad", "RolloutService", "TakenGroup"]

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class TakenGroup(Generic[T, R]):
    """A group that a step trains on.

    Attributes:
        task: the task that was submitted.
        result: return value of the service's ``run_group``.
        version: version of the newest weights when it started.
    """

    task: T
    result: R
    version: int


@dataclass(frozen=True)
class QueueLoad:
    """Numbers of groups by state.

    Attributes:
        waiting: groups submitted and not started.
        running: groups started and not finished.
        ready: groups finished and not taken.
        dropped: groups finished and dropped since the beginning.
    """

    waiting: int
    running: int
    ready: int
    dropped: int


@dataclass
class GroupQueue(Generic[T, R]):
    """Queue of groups, from their submission to the step that takes them.

    Args:
        admission: decides what starts and what is taken.
        version: version of the newest weights.
    """

    admission: BaseAdmission
    version: int = 0
    _waiting: deque[T] = field(init=False, default_factory=deque)
    _groups: dict[int, StartedGroup] = field(init=False, default_factory=dict)
    _tasks: dict[int, T] = field(init=False, default_factory=dict)
    _results: dict[int, R] = field(init=False, default_factory=dict)
    _started: int = field(init=False, default=0)
    _finished: int = field(init=False, default=0)
    _dropped: list[T] = field(init=False, default_factory=list)
    _dropped_before: int = field(init=False, default=0)
    _in_training: int = field(init=False, default=0)

    def __len__(self) -> int:
        """Return the number of groups that no step has taken."""
        return len(self._waiting) + len(self._groups)

    @property
    def load(self) -> QueueLoad:
        """Current numbers of groups by state."""
        running = len(self._groups) - len(self._results)
        dropped = self._dropped_before + len(self._dropped)
        return QueueLoad(len(self._waiting), running, len(self._results), dropped)

    def submit(self, tasks: Iterable[T]) -> None:
        """Append tasks; they start when the admission has room."""
        self._waiting.extend(tasks)

    def start(self) -> list[tuple[int, T]]:
        """Start the tasks that the admission has room for; return them with their groups' numbers."""
        begun = []
        for _ in range(min(self.admission.room(self._view()), len(self._waiting))):
            number, task = self._started, self._waiting.popleft()
            self._groups[number], self._tasks[number] = StartedGroup(number, self.version), task
            self._started += 1
            begun.append((number, task))
        return begun

    def finish(self, number: int, result: R) -> None:
        """Keep the result of a group until a step takes it."""
        self._groups[number] = replace(self._groups[number], finished_as=self._finished)
        self._finished += 1
        self._results[number] = result

    def take(self, count: int) -> list[TakenGroup[T, R]]:
        """Return the groups that a step trains on; empty if it has to wait."""
        selection = self.admission.select(self._view(), count)
        for number in selection.drop:
            self._dropped.append(self._remove(number).task)
        groups = [self._remove(number) for number in selection.take]
        self._in_training += len(groups)
        return groups

    def take_dropped(self) -> list[T]:
        """Return the tasks that were dropped since the last call."""
        dropped, self._dropped = self._dropped, []
        self._dropped_before += len(dropped)
        return dropped

    def publish(self, version: int) -> None:
        """Set the version of the weights; groups taken before count as trained."""
        self.version, self._in_training = version, 0
        self.admission.observe(self._view())

    def _remove(self, number: int) -> TakenGroup[T, R]:
        return TakenGroup(self._tasks.pop(number), self._results.pop(number), self._groups.pop(number).version)

    def _view(self) -> AdmissionView:
        return AdmissionView(tuple(self._groups.values()), self.version, self._in_training, self._started)


class RolloutService(Generic[T, R]):
    """Runner of the groups of a queue; used from one event loop.

    Args:
        admission: paces the groups.
        run_group: runs the rollouts of a task and scores them.
        version: version of the newest weights.
    """

    def __init__(self, admission: BaseAdmission, run_group: Callable[[T], Awaitable[R]], version: int = 0) -> None:
        self.queue: GroupQueue[T, R] = GroupQueue(admission, version)
        self._run_group = run_group
        self._running: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._failure: Exception | None = None
        self._idle_since: float | None = time.monotonic()
        self._idle_s = 0.0

    async def submit(self, tasks: Sequence[T]) -> None:
        """Append tasks, each one group; they start when the admission has room."""
        self.queue.submit(tasks)
        self._start()

    async def take(self, count: int) -> list[TakenGroup[T, R]]:
        """Return the groups of a step as soon as the admission has enough.

        Raises:
            Exception: the error of the first group that failed as a whole.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            if groups := self.queue.take(count):
                self._start()
                return groups
            self._start()  # dropped groups make room
            await self._changed.wait()

    async def publish(self, version: int) -> None:
        """Start using new weights, which the engines must already have."""
        self.queue.publish(version)
        self._start()

    async def take_idle_seconds(self) -> float:
        """Return the seconds since the last call in which no group ran."""
        now = time.monotonic()
        if self._idle_since is not None:
            self._idle_s += now - self._idle_since
            self._idle_since = now
        idle_s, self._idle_s = self._idle_s, 0.0
        return idle_s

    async def close(self) -> None:
        """Cancel running groups."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _start(self) -> None:
        for number, task in self.queue.start():
            running = asyncio.ensure_future(self._run(number, task))
            self._running.add(running)
            running.add_done_callback(self._end)
        if self._running and self._idle_since is not None:
            self._idle_s += time.monotonic() - self._idle_since
            self._idle_since = None

    async def _run(self, number: int, task: T) -> None:
        try:
            result = await self._run_group(task)
        except Exception as error:  # noqa: BLE001  # `take` raises it in the trainer's thread
            self._failure = self._failure or error
        else:
            self.queue.finish(number, result)
        self._changed.set()

    def _end(self, ended: asyncio.Task[None]) -> None:
        self._running.discard(ended)
        if not self._running:
            self._idle_since = time.monotonic()
