"""A process that forks children which run users' code; run as ``python -P _fork_server.py <socket's number>``.

It runs no user's code itself and has a single thread, so that a fork is cheap and safe. The first message is a pickled
setup; each further message is one letter with an argument, see :mod:`rollcast.contracts.user_processes`. At import this
file needs only the standard library, because the search path is not set yet.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

#: One letter and a process id; or a process id or an exit status as the answer.
REQUEST = struct.Struct("!cq")
ANSWER = struct.Struct("!q")
LENGTH = struct.Struct("!Q")
_PR_SET_PDEATHSIG = 1
#: Seconds between two checks that the owner is alive, whose end of the socket may be open in another process.
_LOOK_S = 1.0


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _die_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):  # Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The kernel frees memory by ending this process instead of the run.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _child(entry: Callable[[socket.socket], None], control: socket.socket, descriptor: int) -> None:
    os.setsid()
    _die_with_parent()
    control.close()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "numpy" in sys.modules:  # forked children would draw the same numbers
        sys.modules["numpy"].random.seed()
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    # A process that a user's code forks must neither answer for this one nor keep the connection open.
    os.register_at_fork(after_in_child=connection.close)
    entry(connection)


def _fork(entry: Callable[[socket.socket], None], control: socket.socket, descriptor: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _child(entry, control, descriptor)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001  # a user's code may raise anything; the process ends here
        sys.excepthook(*sys.exc_info())
    finally:
        # Without the exit handlers of the modules that were imported before the fork.
        os._exit(status & 0xFF)


def _end(pid: int) -> int:
    """End a child with its process group; return its exit status, negative for a signal."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return 0


def main(number: int) -> None:
    """Serve the owner until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=number)
    owner = os.getppid()
    setup: dict[str, Any] = pickle.loads(_exactly(control, LENGTH.unpack(_exactly(control, LENGTH.size))[0]))
    sys.path[:] = setup["path"]
    from rollcast.plugins.inprocess import install_snapshot

    install_snapshot(setup["snapshot"])
    module, _, name = setup["entry"].partition(":")
    entry = getattr(importlib.import_module(module), name)
    control.sendall(ANSWER.pack(os.getpid()))
    control.settimeout(_LOOK_S)
    children: set[int] = set()
    try:
        while os.getppid() == owner:
            try:
                data, descriptors, _, _ = socket.recv_fds(control, REQUEST.size, 1)
            except TimeoutError:
                continue
            if not data:
                return
            letter, pid = REQUEST.unpack(data)
            if letter == b"F":
                answer = _fork(entry, control, descriptors[0])
                os.close(descriptors[0])
                children.add(answer)
            else:
                answer = _end(pid)
                children.discard(pid)
            control.sendall(ANSWER.pack(answer))
    finally:
        for pid in children:
            _end(pid)


if __name__ == "__main__":
    main(int(sys.argv[1]))
