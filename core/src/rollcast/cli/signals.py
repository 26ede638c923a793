"""Ctrl-C and SIGTERM: the first asks the command to stop, the second ends it at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["stoppable"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first SIGINT or SIGTERM, and exit with code 2 at the second.

    What the command has started stops as the first error travels up. Should that hang, a second
    signal ends the process once Python runs again, so not within one call of a C library that never
    returns; an embedded Ray's processes end with it, and checkpoints are complete
    or absent at any moment.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner, count = os.getpid(), 0

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal count
        if os.getpid() != owner:  # a forked child, such as a data loader's: what its parent set is not for it
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        count += 1
        if count == 1:
            raise KeyboardInterrupt
        # A live display hides the cursor, and nothing will restore it any more.
        show_cursor = b"\x1b[?25h" if sys.stderr.isatty() else b""
        os.write(2, show_cursor + b"\nended at once\n")
        os._exit(2)

    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        # After an interrupt the handler stays: a second signal may yet come while Python shuts down.
        if count == 0:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
