"""Connections between the processes of a replica that spans nodes: when one of them ends, all do."""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rollcast.errors import RolloutError

__all__ = ["Lifeline", "Meeting", "MeetingPlace", "connect", "listen"]

_CONNECT_S = 30.0
_HELLO_BYTES = 256
#: Seconds without an answer of the other node until a connection counts as broken: idle time, interval, and probes.
_KEEPALIVE = (10, 5, 3)


@dataclass(frozen=True)
class Meeting:
    """The place where the processes of a replica meet, on the replica's first node.

    Attributes:
        address: host of the first node.
        port: port for the engine's processes.
        lifeline: port for the replica's processes.
        token: secret of the replica's processes.
    """

    address: str
    port: int
    lifeline: int
    token: str = field(repr=False)


class MeetingPlace:
    """The sockets of a :class:`Meeting` in the process that starts the replica's first process."""

    def __init__(self, address: str) -> None:
        self.listener = socket.create_server((address, 0))
        # Does not listen, so that the engine can bind the port, while no process that asks for a free port gets it.
        self._reserved = socket.socket(self.listener.family)
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind((address, 0))
        port, lifeline = self._reserved.getsockname()[1], self.listener.getsockname()[1]
        self.meeting = Meeting(address, port, lifeline, secrets.token_urlsafe(24))

    def close(self) -> None:
        """Release the ports."""
        self.listener.close()
        self._reserved.close()


class Lifeline:
    """The connections of one process to the others.

    Args:
        on_loss: called once, in a thread, with a phrase that names the process that ended.
    """

    def __init__(self, on_loss: Callable[[str], None]) -> None:
        self._on_loss = on_loss
        self._lock = threading.Lock()
        self._is_closed = False
        self._sockets: list[socket.socket] = []

    def start(self, run: Callable[..., None], *args: Any) -> None:
        """Call ``run(*args)`` in a daemon thread."""
        threading.Thread(target=run, args=args, name="rollcast-lifeline", daemon=True).start()

    def keep(self, connection: socket.socket) -> None:
        """Close the connection with the others."""
        self._sockets.append(connection)

    def watch(self, connection: socket.socket, other: str) -> None:
        """Wait until the other process ends; it sends nothing."""
        _keep_alive(connection)
        self.keep(connection)
        with suppress(OSError):
            while connection.recv(_HELLO_BYTES):
                pass
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._on_loss(f"{other} ended")

    def close(self) -> None:
        """Close the connections, which ends the other processes."""
        with self._lock:
            self._is_closed = True
        for connection in self._sockets:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def listen(listener: socket.socket, token: str, on_loss: Callable[[str], None]) -> Lifeline:
    """Accept the connections of the other nodes' processes, on the replica's first node."""
    lifeline = Lifeline(on_loss)
    lifeline.keep(listener)

    def meet(connection: socket.socket) -> None:
        connection.settimeout(_CONNECT_S)
        try:
            hello = json.loads(connection.recv(_HELLO_BYTES))
            is_known = secrets.compare_digest(str(hello["token"]), token)
        except (OSError, ValueError, KeyError, TypeError):
            is_known = False
        if not is_known:
            connection.close()
            return
        connection.settimeout(None)
        lifeline.watch(connection, f"its process on node {hello['host']}")

    def accept() -> None:
        with suppress(OSError):  # closed
            while True:
                lifeline.start(meet, listener.accept()[0])

    lifeline.start(accept)
    return lifeline


def connect(meeting: Meeting, host: str, on_loss: Callable[[str], None]) -> Lifeline:
    """Connect to the process on the replica's first node.

    Args:
        meeting: address and token of that process.
        host: address of this node.
        on_loss: called when that process ends.

    Raises:
        RolloutError: it is not reachable.
    """
    try:
        connection = socket.create_connection((meeting.address, meeting.lifeline), _CONNECT_S)
        connection.sendall(json.dumps({"token": meeting.token, "host": host}).encode())
    except OSError as error:
        raise RolloutError(
            f"node {host} cannot reach the replica's first node at {meeting.address}:{meeting.lifeline}: {error}"
        ) from error
    connection.settimeout(None)
    lifeline = Lifeline(on_loss)
    lifeline.start(lifeline.watch, connection, f"the process on the first node, {meeting.address},")
    return lifeline


def _keep_alive(connection: socket.socket) -> None:
    """Make a connection break when the other node is gone, which sends no packet."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in zip(("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"), _KEEPALIVE, strict=True):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
