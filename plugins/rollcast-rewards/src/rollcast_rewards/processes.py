"""The reward manager ``prime``: scoring in worker processes, which the manager may end."""

from __future__ import annotations

import logging
import os
import pickle
import selectors
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from rollcast.contracts.reward import BaseReward, RewardSample, RewardSettings
from rollcast.contracts.user_processes import UserProcess, UserProcesses, describe_status
from rollcast.errors import ConfigError, RewardError
from rollcast_rewards.policy import Failure, Outcome, Outcomes, PolicyRewardManager, timed_out
from rollcast_rewards.worker import HEADER

__all__ = ["PrimeRewardManager"]

logger = logging.getLogger(__name__)
_MOST_PROCESSES = 8
#: Time limit in seconds for a process to load the reward.
_LOAD_S = 120.0
_CHUNK = 1 << 16


class _Process:
    """A worker process, with the samples of its current call and their deadline."""

    def __init__(self, child: UserProcess, setup: bytes) -> None:
        self.child = child
        self.connection = child.connection
        self.ready = False
        self.part: range | None = None
        self.deadline: float | None = time.monotonic() + _LOAD_S
        self._received = bytearray()
        self.send(setup)

    def send(self, data: bytes) -> None:
        """Send one message; a dead process is noticed on the next read."""
        self.connection.settimeout(_LOAD_S)
        with suppress(OSError):
            self.connection.sendall(HEADER.pack(len(data)) + data)

    def receive(self) -> tuple[Any, ...] | None:
        """Return the next complete message; None if it has not arrived.

        Raises:
            EOFError: the process has ended.
        """
        self.connection.setblocking(False)
        try:
            part = self.connection.recv(_CHUNK)
        except BlockingIOError:
            return None
        except OSError as error:
            raise EOFError from error
        if not part:
            raise EOFError
        self._received += part
        if len(self._received) < HEADER.size:
            return None
        end = HEADER.size + HEADER.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        try:
            message: tuple[Any, ...] = pickle.loads(bytes(self._received[HEADER.size : end]))
        except Exception as error:  # the reward wrote into the connection
            raise EOFError from error
        del self._received[:end]
        return message

    @property
    def is_gone(self) -> bool:
        """True if the process has ended since its last call, or answers without one."""
        try:
            return self.ready and self.receive() is not None
        except EOFError:
            return True

    def end(self) -> int:
        """End the process and its children; return its exit status."""
        return self.child.end()


class PrimeRewardManager(PolicyRewardManager):
    """A manager that scores samples in parallel processes, which start with the first batch and are kept.

    A process whose call exceeds ``reward.timeout_s`` or the memory limit is ended and replaced, so a hang in C
    code or a crash affects only its own sample. The reward is pickled (by value for a lambda or a function of a
    notebook); each process has its own module-level state. An asynchronous reward is awaited
    on an event loop of its process.

    A call has one sample, or ``batch_size`` if the reward scores batches. A batch that raises, or ends its process, is
    bisected until the sample is found that causes it. All samples of a batch that takes longer than
    ``reward.timeout_s`` are bad.

    Args:
        reward, settings: see :class:`BaseRewardManager`.
        num_processes: number of processes; None for one per CPU core, at most 8, or for a single one if the reward is
            ``sequential``.
        memory_limit_mb: memory in MiB that each may allocate after it has loaded the reward; None for no limit.
        batch_size: samples per call of a reward that scores batches; None for all at once.

    Raises:
        ConfigError: a number is not positive, or the reward cannot be pickled.
    """

    def __init__(
        self,
        reward: BaseReward,
        settings: RewardSettings | None = None,
        num_processes: int | None = None,
        memory_limit_mb: int | None = 2048,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(reward, settings)
        sizes = {"num_processes": num_processes, "memory_limit_mb": memory_limit_mb, "batch_size": batch_size}
        for key, value in sizes.items():
            if value is not None and value < 1:
                raise ConfigError(f"reward.reward_manager_kwargs.{key} is {value}; it must be at least 1")
        self._batch_size = batch_size
        self._count = num_processes or (1 if reward.sequential else min(os.cpu_count() or 1, _MOST_PROCESSES))
        try:
            pickled = cloudpickle.dumps(reward)
        except Exception as error:
            raise ConfigError(
                f"reward {self.name} cannot be pickled for the processes of reward.reward_manager=prime "
                f"({type(error).__name__}: {error}); naive scores without them"
            ) from error
        setup = {"reward": pickled, "timeout_s": self.settings.timeout_s, "memory_limit_mb": memory_limit_mb}
        self._setup = pickle.dumps(setup)
        self._processes: list[_Process] = []
        self._source = UserProcesses("rollcast_rewards.worker:serve", ("rollcast.rewards",))
        self._finalizer = weakref.finalize(self, self._source.close)

    def score_all(self, samples: Sequence[RewardSample], outcomes: Outcomes) -> None:
        waiting = self._divide(len(samples))
        for process in [worker for worker in self._processes if worker.is_gone]:
            process.end()
            self._processes.remove(process)
        while len(self._processes) < min(self._count, len(waiting)):
            self._processes.append(self._start())
        try:
            while outcomes.undecided:
                self._assign(samples, waiting, outcomes)
                for process in self._wait():
                    self._handle(process, waiting, outcomes)
        except BaseException:
            self.close()  # samples in other processes belong to a finished batch
            raise

    def close(self) -> None:
        while self._processes:
            self._processes.pop().end()
        self._source.close()

    def _start(self) -> _Process:
        return _Process(self._source.fork(), self._setup)

    def _divide(self, count: int) -> deque[range]:
        """Return the samples of each call, in order."""
        size = (self._batch_size or count) if self.reward.scores_batches else 1
        return deque(range(start, min(start + size, count)) for start in range(0, count, size))

    def _assign(self, samples: Sequence[RewardSample], waiting: deque[range], outcomes: Outcomes) -> None:
        for process in self._processes:
            while process.ready and process.part is None and waiting:
                part = waiting.popleft()
                try:
                    data = cloudpickle.dumps([samples[index] for index in part])
                except Exception as error:  # noqa: BLE001 -- reported as the sample's error
                    failure = Failure("raised", f"cannot get the sample, which does not pickle: {error}", error)
                    self._decide(part, failure, waiting, outcomes)
                    continue
                process.part = part
                limit = self.settings.timeout_s
                process.send(data)
                process.deadline = None if limit is None else time.monotonic() + limit

    def _wait(self) -> list[_Process]:
        """Return the processes that have sent a message, ended, or passed their deadline."""
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                selector.register(process.connection, selectors.EVENT_READ, process)
            deadlines = [process.deadline for process in self._processes if process.deadline is not None]
            timeout = max(min(deadlines) - time.monotonic(), 0.0) if deadlines else None
            ready = [key.data for key, _ in selector.select(timeout)]
        now = time.monotonic()
        late = [worker for worker in self._processes if worker.deadline is not None and worker.deadline <= now]
        return ready + [process for process in late if process not in ready]

    def _handle(self, process: _Process, waiting: deque[range], outcomes: Outcomes) -> None:
        try:
            message = process.receive()
        except EOFError:
            self._replace(process, self._died(process), waiting, outcomes)
            return
        if message is None:
            if process.deadline is not None and process.deadline <= time.monotonic():
                self._replace(process, self._late(process), waiting, outcomes)
            return
        if message[0] == "broken":
            raise RewardError(
                f"reward {self.name} cannot be loaded in a process of reward.reward_manager=prime: {message[1]}"
            )
        if message[0] == "ready":
            process.ready, process.deadline = True, None
            return
        if message[0] == "count":
            count = 0 if process.part is None else len(process.part)
            raise RewardError(f"reward {self.name}: {count} samples were given, {message[1]} scores came back")
        answer = _read_answer(message)
        if isinstance(answer, Failure) and answer.kind == "memory":
            # The reward may still hold the memory of the failed sample.
            self._replace(process, answer, waiting, outcomes)
            return
        part, process.part, process.deadline = process.part, None, None
        if part is not None:
            self._decide(part, answer, waiting, outcomes)

    def _decide(self, part: range, answer: Failure | list[Outcome], waiting: deque[range], outcomes: Outcomes) -> None:
        """Decide the samples of one call; of several samples that failed together, halves are tried again."""
        if isinstance(answer, Failure):
            if len(part) > 1 and answer.kind != "timeout":
                middle = len(part) // 2
                waiting.extendleft((part[middle:], part[:middle]))
                return
            answer = [answer] * len(part)
        for index, outcome in zip(part, answer, strict=True):
            outcomes.add(index, outcome)

    def _died(self, process: _Process) -> Failure:
        status = process.end()
        how = describe_status(status)
        if not process.ready:
            raise RewardError(f"reward {self.name}: a process of reward.reward_manager=prime did not start ({how})")
        return Failure("died", f"ended its process ({how})")

    def _late(self, process: _Process) -> Failure:
        if not process.ready:
            raise RewardError(f"reward {self.name} was not loaded within {_LOAD_S:g} s in a process of its own")
        size = 0 if process.part is None else len(process.part)
        return timed_out(self.settings.timeout_s, f" (a batch of {size})" if size > 1 else "")

    def _replace(self, process: _Process, failure: Failure, waiting: deque[range], outcomes: Outcomes) -> None:
        """End a process and decide its samples; start another process if samples are waiting."""
        process.end()
        self._processes.remove(process)
        if process.part is not None:
            self._decide(process.part, failure, waiting, outcomes)
        if waiting:
            self._processes.append(self._start())


def _read_answer(message: tuple[Any, ...]) -> Failure | list[Outcome]:
    if message[0] == "failure":
        return Failure(message[1], message[2])
    answer: list[Outcome] = message[1]
    return answer
