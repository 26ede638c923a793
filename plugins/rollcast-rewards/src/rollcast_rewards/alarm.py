"""A time limit for Python code in this process."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

__all__ = ["Alarm", "TimeUp"]

T = TypeVar("T")
_AGAIN_S = 0.1


class TimeUp(BaseException):
    """A call took too long. Not an ``Exception``, so that code which catches ``Exception`` does not continue."""


class Alarm:
    """A time limit for calls, by SIGALRM.

    The limit holds in the main thread, between two steps of the interpreter: a call that hangs inside a
    C extension is not interrupted. In other threads, or with ``seconds=None``, there is no limit.
    An alarm that other code has set keeps running and is restored at the end.

    Args:
        seconds: limit of each call in seconds.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._active = seconds is not None and threading.current_thread() is threading.main_thread()
        self._ringing = False
        self._outer: Any = None
        self._outer_left = 0.0
        self._since = 0.0

    def __enter__(self) -> Self:
        if self._active:
            self._since = time.monotonic()
            self._outer_left, _ = signal.setitimer(signal.ITIMER_REAL, 0.0)
            self._outer = signal.signal(signal.SIGALRM, self._ring)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._active:
            return
        self.disarm()
        signal.signal(signal.SIGALRM, self._outer)
        if self._outer_left > 0:
            left = self._outer_left - (time.monotonic() - self._since)
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3))

    def call(self, function: Callable[[Any], T], argument: Any) -> T:
        """Return ``function(argument)``; exceptions of the function pass through.

        Raises:
            TimeUp: the call took too long; the caller has to call :meth:`disarm` next.
        """
        if not self._active or self._seconds is None:
            return function(argument)
        self._ringing = True
        # The alarm repeats, for code that catches everything in a loop.
        signal.setitimer(signal.ITIMER_REAL, self._seconds, _AGAIN_S)
        try:
            return function(argument)
        finally:
            self.disarm()

    def disarm(self) -> None:
        """Cancel the alarm.

        An alarm may interrupt the end of :meth:`call` itself, so a caller that catches ``TimeUp`` disarms again.
        """
        if not self._active:
            return
        self._ringing = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if self._ringing:
            raise TimeUp
