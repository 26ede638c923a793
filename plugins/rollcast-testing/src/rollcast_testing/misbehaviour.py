"""Ways in which a user's code can end, hang or flood its process, for tests; light to import."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["CASES", "RAISES", "misbehave"]


def _interrupted() -> None:
    raise KeyboardInterrupt


def _stubborn() -> None:
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(0.05)


def _spin() -> None:
    while True:
        pass


def _recurse() -> int:
    return 1 + _recurse()


def _eat() -> None:
    held = []
    while True:
        held.append(bytearray(64 << 20))


def _shout() -> None:
    with open(os.devnull, "w") as file:
        while True:
            file.write("x" * 65536)


def _threads() -> None:
    for _ in range(200):
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    os._exit(9)


def _fork_and_hang() -> None:
    if os.fork() == 0:
        time.sleep(3600)
    time.sleep(3600)


def _fork_bomb() -> None:
    for _ in range(5):
        os.fork()
    time.sleep(3600)


def _no_descriptors() -> None:
    os.closerange(0, 256)
    time.sleep(3600)


def _write_everywhere() -> None:
    for descriptor in range(3, 256):
        try:
            os.write(descriptor, b"\xff" * 64)
        except OSError:
            continue
    time.sleep(3600)


def _children() -> None:
    for _ in range(3):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    os.abort()


def _hold() -> None:
    # A C function that keeps the interpreter's lock.
    ctypes.PyDLL(None).usleep(4_000_000_000)


def _kill(number: int) -> Callable[[], None]:
    def kill() -> None:
        os.kill(os.getpid(), number)
        time.sleep(3600)

    return kill


CASES: dict[str, Callable[[], Any]] = {
    "sys.exit": lambda: sys.exit(3),
    "sys.exit(0)": lambda: sys.exit(0),
    "os._exit": lambda: os._exit(7),
    "os._exit(0)": lambda: os._exit(0),
    "abort": os.abort,
    "interrupt": _interrupted,
    "sigint": _kill(signal.SIGINT),
    "sigterm": _kill(signal.SIGTERM),
    "sigkill": _kill(signal.SIGKILL),
    "sigstop": _kill(signal.SIGSTOP),
    "segfault": lambda: ctypes.string_at(0),
    "sleep": lambda: time.sleep(1e6),
    "spin": _spin,
    "stubborn": _stubborn,
    "hold": _hold,
    "recursion": _recurse,
    "memory": _eat,
    "output": _shout,
    "threads": _threads,
    "fork": _fork_and_hang,
    "fork bomb": _fork_bomb,
    "descriptors": _no_descriptors,
    "writes": _write_everywhere,
    "children": _children,
}


#: Cases that end with an exception where the memory of the process is limited.
RAISES = frozenset({"recursion", "memory", "threads"})


def misbehave(case: str) -> None:
    """Do what a case says; nothing for ``good``."""
    if case != "good":
        CASES[case]()
