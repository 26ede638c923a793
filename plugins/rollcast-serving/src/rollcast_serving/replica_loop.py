"""The event loop of a run's replicas, and the thread that owns their workers."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from rollcast.errors import RollcastError

__all__ = ["ReplicaLoop"]

T = TypeVar("T")


@dataclass
class _Errand:
    """A call to the run's workers that waits for the thread that owns them."""

    call: Callable[[], Any]
    result: Future[Any] = field(default_factory=Future)

    def run(self) -> None:
        """Make the call, unless its result is no longer awaited."""
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            value = self.call()
        except BaseException as error:
            self.result.set_exception(error)
            if not isinstance(error, RollcastError):
                raise
        else:
            self.result.set_result(value)


class ReplicaLoop:
    """An event loop in its own thread; the thread that waits in :meth:`run` makes calls for its coroutines.

    All roles that replicas play share one loop, so that a dead replica of any role is restarted whenever the trainer
    waits for one of them.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollcast-replicas", daemon=True)
        self._errands: deque[_Errand] = deque()
        #: Notified when an errand arrives or a call ends.
        self._changed = threading.Condition()
        self._thread.start()

    async def in_owner(self, call: Callable[[], T]) -> T:
        """Return the result of a call that is made by the next thread that waits in :meth:`run`."""
        errand = _Errand(call)
        with self._changed:
            self._errands.append(errand)
            self._changed.notify_all()
        return cast("T", await asyncio.wrap_future(errand.result))

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine from another thread; unlike :meth:`run`, waiting for its future makes no calls."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return a coroutine's result; meanwhile make the calls that coroutines request with :meth:`in_owner`."""
        future = self.submit(coroutine)
        future.add_done_callback(self._wake)
        try:
            while not future.done():
                with self._changed:
                    self._changed.wait_for(lambda: future.done() or self._errands)
                    errand = self._errands.popleft() if self._errands else None
                if errand is not None:
                    errand.run()
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _wake(self, _: object) -> None:
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread; may be called twice."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
