"""A process that scores samples for the manager ``prime``; run as ``python -P worker.py <socket's number>``.

The first message has the module search path and the reward; each further message has a sample. Messages are
pickles, preceded by their length. At import this file needs only the standard library, because the search path is
not set yet.
"""

from __future__ import annotations

import asyncio
import pickle
import resource
import signal
import socket
import struct
import sys
import traceback
from pathlib import Path
from typing import Any

__all__ = ["HEADER", "main"]

HEADER = struct.Struct("!Q")
#: Delay in seconds after the manager's time limit at which the kernel ends a sample, in case the manager has died.
_GRACE_S = 5.0


def main(number: int) -> None:
    """Serve one manager until it closes the connection."""
    connection = socket.socket(fileno=number)
    message = _receive(connection)
    if message is None:
        return
    setup: dict[str, Any] = pickle.loads(message)
    sys.path[:] = setup["path"]
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
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        _send(connection, answer)


def _prepare(setup: dict[str, Any]) -> Any:
    from rollcast_rewards.policy import check_value, failure_of

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


if __name__ == "__main__":
    main(int(sys.argv[1]))
