"""Running blocking functions in threads that never delay the end of the process."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

__all__ = ["DaemonExecutor", "abandoned_calls", "in_thread"]

T = TypeVar("T")


class DaemonExecutor(Executor):
    """An executor that starts a thread for each call unless one is idle.

    The standard pool has a limited number of threads, and waits for them at the exit of the process: hundreds of
    blocking tools would wait for each other, and a hanging one would keep the process alive.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._idle = 0
        self._lock = threading.Lock()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((future, functools.partial(fn, *args, **kwargs)))
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
                return future
        threading.Thread(target=self._work, name="rollcast-agents", daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            future, call = self._calls.get()
            if future.set_running_or_notify_cancel():
                process = os.getpid()
                try:
                    result = call()
                except BaseException as error:  # noqa: BLE001  # raised where the result is awaited
                    _end_if_copy(process)
                    future.set_exception(error)
                else:
                    _end_if_copy(process)
                    future.set_result(result)
                    del result
            # An idle thread must not keep the last result alive.
            del future, call
            with self._lock:
                self._idle += 1


def _end_if_copy(process: int) -> None:
    """End this process if the call forked and this is the copy, which has no other thread and no event loop."""
    if os.getpid() != process:
        os._exit(0)


_EXECUTOR = DaemonExecutor()
#: Calls whose caller was cancelled while they run.
_ABANDONED: set[Future[Any]] = set()


def abandoned_calls() -> int:
    """Return the number of calls that still run although their caller was cancelled."""
    return len(_ABANDONED)


async def in_thread(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Return the result of a blocking function, called in a separate thread.

    A cancelled call is not awaited; its thread runs until the function ends.
    """
    call = functools.partial(contextvars.copy_context().run, function, *args, **kwargs)
    future = _EXECUTOR.submit(call)
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if future.running():
            _ABANDONED.add(future)
            future.add_done_callback(_ABANDONED.discard)
        raise
