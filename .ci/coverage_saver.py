"""Write the measured lines of a process about once a second, and when it ends itself with ``os._exit``.

Ray and supervisors of processes kill them, so that coverage.py has no chance to write at their end. ``nox -s coverage``
has every Python process of its environment import this module at start, after coverage.py itself.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import NoReturn

from coverage import Coverage
from coverage.exceptions import CoverageException

_INTERVAL_S = 1.0
#: Largest fraction of its time that the thread spends on saving, so that processes of many lines do not slow all tests.
_SHARE = 0.05
_exit = os._exit
_saving = threading.Lock()


def save() -> None:
    """Write the lines that this process has run, if coverage.py measures it and no other thread is writing them."""
    measured = Coverage.current()
    if measured is None or not _saving.acquire(timeout=_INTERVAL_S):
        return
    try:
        # A process at its end may have closed the file of its data.
        with suppress(CoverageException, OSError, ValueError):
            measured.save()
    finally:
        _saving.release()


def exit_saved(status: int) -> NoReturn:
    """Save and end this process. A function of a module, because tests pickle ``os._exit``."""
    save()
    _exit(status)


def _save_forever(pid: int) -> None:
    pause = _INTERVAL_S
    while os.getpid() == pid:
        time.sleep(pause)
        start = time.thread_time()
        save()
        pause = max(_INTERVAL_S, (time.thread_time() - start) / _SHARE)


def start() -> None:
    """Start the thread that saves, in a process that coverage.py measures."""
    global _saving  # noqa: PLW0603  # a process has one lock
    _saving = threading.Lock()  # a thread of the process that was forked may have held the other
    if Coverage.current() is not None:
        threading.Thread(target=_save_forever, args=(os.getpid(),), name="coverage-saver", daemon=True).start()


start()
os._exit = exit_saved
os.register_at_fork(after_in_child=start)  # called after coverage.py's own, which was registered before
