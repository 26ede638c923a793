"""Processes for users' code, which may exit, hang or crash without harm to the run.

:class:`UserProcesses` starts one process that imports the library but no user's code, and forks a child for each
:meth:`~UserProcesses.fork`, which takes milliseconds. Children are ended with everything that they started, at the
latest when the owner is gone.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Collection
from pathlib import Path

from rollcast._fork_server import ANSWER, LENGTH, REQUEST
from rollcast.errors import ResourceError
from rollcast.plugins.inprocess import snapshot

__all__ = ["UserProcess", "UserProcesses", "describe_status"]

_SERVER = Path(__file__).parents[1] / "_fork_server.py"
#: Longest time in seconds for the import of the library, or for a fork, on a loaded machine.
_START_S = 120.0


class UserProcess:
    """A child process and the connection to it.

    Attributes:
        pid: process id.
        connection: stream socket, whose other end the child's entry function has.
    """

    def __init__(self, owner: _Server, pid: int, connection: socket.socket) -> None:
        self._owner = owner
        self._status: int | None = None
        self.pid, self.connection = pid, connection

    def end(self) -> int:
        """End the process and its process group; return its exit status, negative for a signal.

        May be called again. A process that has already ended keeps its own status.
        """
        if self._status is None:
            self.connection.close()
            self._status = self._owner.ask(b"E", self.pid)
        return self._status


class _Server:
    """The forking process of an owner."""

    def __init__(self, entry: str, groups: Collection[str]) -> None:
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_START_S)
        setup = pickle.dumps({"path": sys.path, "snapshot": snapshot(groups), "entry": entry})
        with theirs:
            self._popen = subprocess.Popen(  # noqa: S603  # our own interpreter and file
                [sys.executable, "-P", str(_SERVER), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                # One thread, since a fork copies no other.
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        try:
            self._control.sendall(LENGTH.pack(len(setup)) + setup)
            self._answer()
        except OSError as error:
            self.close()
            raise ResourceError(f"the process for users' code did not start: {error}") from error

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def fork(self) -> UserProcess:
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                socket.send_fds(self._control, [REQUEST.pack(b"F", 0)], [theirs.fileno()])
                return UserProcess(self, self._answer(), ours)
        except OSError:
            ours.close()
            raise

    def ask(self, letter: bytes, pid: int) -> int:
        """Return the answer to a request; the status of SIGKILL if the server, and with it its children, is gone."""
        with self._lock, contextlib.suppress(OSError):
            self._control.sendall(REQUEST.pack(letter, pid))
            return self._answer()
        return -signal.SIGKILL

    def _answer(self) -> int:
        data = b""
        while len(data) < ANSWER.size:
            part = self._control.recv(ANSWER.size - len(data))
            if not part:
                raise ConnectionError("it ended; its messages are above")
            data += part
        return int(ANSWER.unpack(data)[0])

    def close(self) -> None:
        self._control.close()  # the server ends its children
        try:
            self._popen.wait(10.0)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


class UserProcesses:
    """A source of child processes for users' code; thread-safe.

    Args:
        entry: function of a child, as ``module:function``; its argument is the child's end of the connection. The
            module is imported before the forks, so it must import no user's code and start no thread.
        groups: groups whose plugins of this process are also registered in the children.
    """

    def __init__(self, entry: str, groups: Collection[str]) -> None:
        self._entry, self._groups = entry, tuple(groups)
        self._server: _Server | None = None
        self._lock = threading.Lock()

    def fork(self) -> UserProcess:
        """Start a child.

        Raises:
            ResourceError: no process can be started.
            PluginError: a plugin of ``groups`` that is registered in this process alone cannot be sent.
        """
        with self._lock:
            for _ in range(2):
                if self._server is None or not self._server.is_alive:
                    self._server = _Server(self._entry, self._groups)
                try:
                    return self._server.fork()
                except OSError:  # it was ended from outside; its children are gone too
                    self._server.close()
        raise ResourceError("no process for users' code can be started: the one that forks them ends at once")

    def close(self) -> None:
        """End all children; may be called again."""
        with self._lock:
            if self._server is not None:
                self._server.close()
                self._server = None


def describe_status(status: int) -> str:
    """Return an exit status as text, such as ``exit status 3`` or ``signal SIGKILL``."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
