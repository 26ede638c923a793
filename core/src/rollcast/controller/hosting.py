"""Hosting of workers: each process holds a dict role → Worker, and a call names a role and a method."""

from __future__ import annotations

import asyncio
import collections
import inspect
import logging
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from rollcast.contracts.marks import mark
from rollcast.contracts.runtime import CallFailure, HostInfo, Outcome, Store, WorkerRaised, cut_here
from rollcast.contracts.worker import ClassWithInitArgs, WorkerContext
from rollcast.controller.arguments import Arguments
from rollcast.controller.dispatch import iter_registered, registered
from rollcast.controller.worker import Worker, hosting
from rollcast.errors import DispatchError
from rollcast.plugins.inprocess import install_snapshot

__all__ = ["WorkerHost"]

_LOG_LINES = 20


class _RecentLog(logging.Handler):
    """A logging handler that keeps the last lines logged in this process, for error messages."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: collections.deque[str] = collections.deque(maxlen=_LOG_LINES)
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def _picklable(error: BaseException) -> BaseException | None:
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:  # noqa: BLE001  # the error's text is sent in any case
        return None


def _usable_cores() -> int:
    """Return the number of cores that this process may use, which in a container can be fewer than the node has."""
    usable = getattr(os, "sched_getaffinity", None)  # Linux
    return (len(usable(0)) if usable is not None else os.cpu_count()) or 1


class KeepHere:
    """The store of a single-process runtime, in which a value is its own reference."""

    def put(self, value: Any) -> Any:
        """Return the value."""
        return value

    def fetch(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        """Return the values."""
        return list(refs)

    def fetch_rows(self, cuts: Sequence[Any], timeout: float | None) -> list[Any]:
        """Return the requested rows of the values."""
        return [cut.of(cut.ref) for cut in cuts]


def runs_beside(cls: type, method: str) -> bool:
    """Return True if a worker class runs the coroutine method concurrently with other calls."""
    function = inspect.getattr_static(cls, method, None)
    return bool(getattr(cls, "concurrent_async", False)) and inspect.iscoroutinefunction(function)


class WorkerHost:
    """The workers of one process, and the entry point for calls to them.

    Args:
        store: store for results with outcome ``keep``; None if this process is also the controller, which then keeps
            the results itself.
    """

    def __init__(self, store: Store | None = None) -> None:
        self.workers: dict[str, Worker] = {}
        self._store: Store = store or KeepHere()
        self._same_process = store is None
        self._context = WorkerContext()
        self._recent = _RecentLog()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._shared_loop: asyncio.AbstractEventLoop | None = None
        #: Thread id → the coroutine that the thread waits for.
        self._beside: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._held_port: socket.socket | None = None

    @property
    def context(self) -> WorkerContext:
        """The place of this process in its group, as passed to :meth:`build`."""
        return self._context

    @staticmethod
    def install(snapshot: bytes | None) -> None:
        """Replace this process's in-process plugin registrations by the driver's (:attr:`LaunchSpec.snapshot`)."""
        install_snapshot(snapshot)

    def describe(self, node: str) -> HostInfo:
        """Return the node address, process id, cores, and a port that is reserved until :meth:`close`.

        Every call returns the same port. A socket with ``SO_REUSEADDR``, such as the stores of ``torch.distributed``,
        can listen on the port; the system assigns it to no other process.
        """
        if self._held_port is None:
            self._held_port = socket.socket()
            # A bound socket that does not listen keeps the system from assigning the port to another process, even
            # as the local port of a connection.
            self._held_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._held_port.bind(("", 0))
        return HostInfo(node, os.getpid(), int(self._held_port.getsockname()[1]), cores=_usable_cores())

    def build(self, context: WorkerContext, roles: Mapping[str, ClassWithInitArgs[Any]]) -> None:
        """Build a worker for each role; the workers can access each other from the start.

        Raises:
            WorkerRaised: a constructor raised.
        """
        self._context = context
        logging.getLogger().addHandler(self._recent)
        for role, cls_with_init in roles.items():
            here = replace(context, role=role)
            try:
                with hosting(here, self.workers):
                    worker = cls_with_init()
                if not isinstance(worker, Worker):
                    raise DispatchError(f"role {role!r}: {type(worker).__name__} does not derive from rollcast.Worker")
            except Exception as error:  # noqa: BLE001  # sent to the controller
                raise self._failure(role, "__init__", error) from None
            self.workers[role] = worker

    def call(
        self, role: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], outcome: Outcome = "send"
    ) -> Any:
        """Run a method of the role's worker; a coroutine runs to its end in the host's event loop.

        Remote columns of the arguments are read, including those nested in lists, tuples and dicts, unless the method
        is registered with ``materialize_futures=False``. The method gets copies of arguments registered in
        ``mutates``; an in-place write to any other argument raises an error after the call.

        Args:
            role, method, args, kwargs: role, method and arguments of the call.
            outcome: ``send`` to return the result; ``keep`` to store a returned DataProto here and return its
                description; ``drop`` to return None.

        Raises:
            WorkerRaised: the method raised, or does not exist.
        """
        try:
            worker = self.workers.get(role)
            if worker is None:
                raise DispatchError(f"no role {role!r} here; roles: {', '.join(self.workers) or 'none'}")
            function = getattr(worker, method)
            arguments = Arguments(registered(function), self._fetch_rows, self._same_process)
            arrived, named = arguments.arrive(function, args, kwargs)
            try:
                with mark(f"{role}.{method}"):
                    result = function(*arrived, **named)
                    if inspect.iscoroutine(result):
                        result = self._run(worker, result)
            finally:
                # Check after an exception too: a caller that catches it continues with the memory as it is.
                arguments.check(f"{role}.{method}")
            if outcome == "drop":
                return None
            return self._kept(result) if outcome == "keep" else result
        except Exception as error:  # noqa: BLE001  # sent to the controller
            raise self._failure(role, method, error) from None

    def _fetch_rows(self, cuts: Sequence[Any], timeout: float | None) -> list[Any]:
        fetch_rows = getattr(self._store, "fetch_rows", None)
        return fetch_rows(cuts, timeout) if fetch_rows is not None else cut_here(self._store.fetch, cuts, timeout)

    def _kept(self, result: Any) -> Any:
        module = sys.modules.get("rollcast.protocol.batch")
        if module is None or not isinstance(result, module.DataProto):
            return result
        from rollcast.protocol import store_batch

        return store_batch(result, self._store.put)

    def close(self) -> None:
        """Call ``close()`` of each worker that has it, in reverse order of building, and stop the event loop.

        Raises:
            WorkerRaised: a ``close()`` raised (the last error is reported); all of them have run.
        """
        with ExitStack() as closing:  # runs its callbacks in reverse order
            closing.callback(self._forget)
            for role, worker in self.workers.items():
                if callable(getattr(worker, "close", None)):
                    closing.callback(self.call, role, "close", (), {})

    def _forget(self) -> None:
        self.workers.clear()
        logging.getLogger().removeHandler(self._recent)
        if self._held_port is not None:
            self._held_port.close()
            self._held_port = None
        if self._loop is not None:
            self._loop.close()
            self._loop = None
        if self._shared_loop is not None:
            self._shared_loop.call_soon_threadsafe(self._shared_loop.stop)
            self._shared_loop = None

    def _run(self, worker: Worker, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine to its end in an event loop that keeps its tasks between calls.

        Coroutines of a worker with ``concurrent_async`` run concurrently in one event loop with its own thread.
        Coroutines of other workers run in this thread, because a second thread would start a second team of OpenMP
        threads, which slows torch down. If this thread already runs an event loop, as in a notebook, another thread
        is used.
        """
        if worker.concurrent_async:
            return self._run_beside(coroutine)
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        task = self._loop.create_task(coroutine)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._to_the_end(self._loop, task)
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self._to_the_end, self._loop, task).result()

    def _run_beside(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        with self._lock:
            if self._shared_loop is None:
                self._shared_loop = asyncio.new_event_loop()
                threading.Thread(target=self._shared_loop.run_forever, name="rollcast-async", daemon=True).start()
            future = asyncio.run_coroutine_threadsafe(coroutine, self._shared_loop)
            self._beside[threading.get_ident()] = future
        try:
            return future.result()
        finally:
            del self._beside[threading.get_ident()]

    def cancel_beside(self, thread: int) -> bool:
        """Cancel the coroutine that ``thread`` waits for in :meth:`call`; return True if there was one."""
        future = self._beside.get(thread)
        return future is not None and future.cancel()

    @staticmethod
    def methods_beside(roles: Mapping[str, type]) -> frozenset[tuple[str, str]]:
        """Return role and name of the registered methods that run concurrently with other calls of their process."""
        return frozenset(
            (role, name) for role, cls in roles.items() for name, _, _ in iter_registered(cls) if runs_beside(cls, name)
        )

    def runs_beside(self, role: str, method: str) -> bool:
        """Return True if calls of the method run concurrently with other calls."""
        return role in self.workers and runs_beside(type(self.workers[role]), method)

    @staticmethod
    def _to_the_end(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> Any:
        try:
            return loop.run_until_complete(task)
        finally:
            if not task.done():  # interrupted; without cancelling, it would continue during the loop's next call
                task.cancel()
                loop.run_until_complete(asyncio.wait([task]))

    def _failure(self, role: str, method: str, error: Exception) -> WorkerRaised:
        return WorkerRaised(
            CallFailure(
                role=role,
                method=method,
                rank=self._context.rank,
                node=self._context.node,
                when=time.time(),
                cause_type=type(error).__name__,
                message=str(error),
                traceback="".join(traceback.format_exception(error)),
                log_lines=tuple(self._recent.lines),
                cause=_picklable(error),
            )
        )
