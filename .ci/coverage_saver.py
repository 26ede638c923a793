"""Write the measured lines of a process once a second, because Ray and the trainer's supervisors kill processes.

``nox -s coverage`` has every Python process of its environment import this module at start, after coverage.py itself.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

from coverage import Coverage
from coverage.exceptions import CoverageException

_INTERVAL_S = 1.0


def _save_forever(pid: int) -> None:
    while os.getpid() == pid:
        time.sleep(_INTERVAL_S)
        measured = Coverage.current()
        # A process at its end may have closed the file of its data.
        with suppress(CoverageException, OSError, ValueError):
            if measured is not None:
                measured.save()


def start() -> None:
    """Start the thread that saves, in a process that coverage.py measures."""
    if Coverage.current() is not None:
        threading.Thread(target=_save_forever, args=(os.getpid(),), name="coverage-saver", daemon=True).start()


start()
os.register_at_fork(after_in_child=start)  # called after coverage.py's own, which was registered before
