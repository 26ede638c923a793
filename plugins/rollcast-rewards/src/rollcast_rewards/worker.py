"""A process that scores samples for the manager ``prime``.

The first message has the reward; each further message has a sample. Messages are pickles, preceded by their length.
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
from pathlib import Path
from typing import Any

from rollcast_rewards.policy import check_value, failure_of

__all__ = ["HEADER", "serve"]

HEADER = struct.Struct("!Q")
#: Delay in seconds after the manager's time limit at which the kernel ends a sample, in case the manager has died.
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
            sample = pickle.loads(message)
            value = reward.score(sample)
            outcome: Any = check_value(value if loop is None else loop.run_until_complete(value), sample)
        except Exception as error:  # noqa: BLE001 -- reported as the sample's error
            outcome = failure_of(error)
        if hasattr(outcome, "kind"):
            return "failure", outcome.kind, outcome.what + _where(outcome.cause)
        return "result", outcome

    return score


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
