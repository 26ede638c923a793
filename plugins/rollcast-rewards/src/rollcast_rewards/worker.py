"""A process that scores samples for the manager ``prime``.

The first message has the reward; each further message has the samples of one call. Messages are pickles,
preceded by their length.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

from rollcast_rewards.policy import check_value, failure_of

__all__ = ["HEADER", "serve"]

HEADER = struct.Struct("!Q")
#: Delay in seconds after the manager's time limit at which the kernel ends a call, in case the manager has died.
_GRACE_S = 5.0


def serve(connection: socket.socket) -> None:
    """Serve one manager until it closes the connection."""
    owner = os.getpid()
    message = _receive(connection)
    if message is None:
        return
    setup: dict[str, Any] = pickle.loads(message)
    try:
        score = _prepare(setup)
    except Exception as error:  # noqa: BLE001 -- the manager raises it
        _send(connection, ("broken", f"{type(error).__name__}: {error}"))
        return
    _send(connection, ("ready",))
    limit = setup["timeout_s"]
    while (message := _receive(connection)) is not None:
        if limit is not None:
            signal.setitimer(signal.ITIMER_REAL, limit + _GRACE_S)
        answer = score(message)
        if os.getpid() != owner:  # the reward forked, and this is the copy
            os._exit(0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        _send(connection, answer)


def _prepare(setup: dict[str, Any]) -> Any:
    # By default, an alarm ends the process, which works even if the interpreter hangs.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    reward = pickle.loads(setup["reward"])
    # Use one event loop for all samples, because a reward's clients are bound to the loop that created them.
    loop = asyncio.new_event_loop() if reward.is_async else None
    if setup["memory_limit_mb"] is not None:
        _limit_memory(setup["memory_limit_mb"] << 20)

    def score(message: bytes) -> tuple[Any, ...]:
        try:
            samples = pickle.loads(message)
            values = list(reward.score_batch(samples)) if reward.scores_batches else [reward.score(samples[0])]
            if loop is not None:
                values = loop.run_until_complete(_await_all(values))
        except Exception as error:  # noqa: BLE001 -- reported as the error of the samples
            failure = failure_of(error)
            return "failure", failure.kind, failure.what + _where(failure.cause)
        if len(values) != len(samples):
            return "count", len(values)
        return "result", [check_value(value, sample) for value, sample in zip(values, samples, strict=True)]

    return score


async def _await_all(values: Sequence[Any]) -> list[Any]:
    return list(await asyncio.gather(*map(_value, values)))


async def _value(value: Any) -> Any:
    return await value if isinstance(value, Awaitable) else value


def _where(error: BaseException | None) -> str:
    # Only the text of the exception is sent, with the place where it was raised.
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def _limit_memory(extra: int) -> None:
    """Limit the address space to its current size plus ``extra`` bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + extra
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _send(connection: socket.socket, message: tuple[Any, ...]) -> None:
    data = pickle.dumps(message)
    connection.sendall(HEADER.pack(len(data)) + data)


def _receive(connection: socket.socket) -> bytes | None:
    header = _read(connection, HEADER.size)
    return None if header is None else _read(connection, HEADER.unpack(header)[0])


def _read(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)
