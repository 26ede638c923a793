"""The one hosting mechanism: a process holds a dict role → Worker, a call names (role, method)."""

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
    """Keeps the last lines logged in this process, for error messages."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: collections.deque[str] = collections.deque(maxlen=_LOG_LINES)
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def _picklable(error: BaseException) -> BaseException | None:
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:  # noqa: BLE001  # whatever is wrong with it, its text travels anyway
        return None


def _usable_cores() -> int:
    """Return the number of cores that this process may run on; a container may have been given a part."""
    usable = getattr(os, "sched_getaffinity", None)  # Linux
    return (len(usable(0)) if usable is not None else os.cpu_count()) or 1


class KeepHere:
    """The store of a runtime with one process: a value is its own reference."""

    def put(self, value: Any) -> Any:
        """Return the value."""
        return value

    def fetch(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        """Return the values."""
        return list(refs)

    def fetch_rows(self, cuts: Sequence[Any], timeout: float | None) -> list[Any]:
        """Return rows of the values."""
        return [cut.of(cut.ref) for cut in cuts]


def runs_beside(cls: type, method: str) -> bool:
    """Return True if a worker class runs the coroutine method beside other calls."""
    function = inspect.getattr_static(cls, method, None)
    return bool(getattr(cls, "concurrent_async", False)) and inspect.iscoroutinefunction(function)


class WorkerHost:
    """Holds one process's workers and runs calls on them.

    Args:
        store: where results with outcome ``keep`` stay; without one they stay in this process, which is then
            taken for the controller's own.
    """

    def __init__(self, store: Store | None = None) -> None:
        self.workers: dict[str, Worker] = {}
        self._store: Store = store or KeepHere()
        self._same_process = store is None
        self._context = WorkerContext()
        self._recent = _RecentLog()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._shared_loop: asyncio.AbstractEventLoop | None = None
        #: Thread → the coroutine that it waits for.
        self._beside: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._held_port: socket.socket | None = None

    @property
    def context(self) -> WorkerContext:
        """The place of this process in its group, as :meth:`build` was given it."""
        return self._context

    @staticmethod
    def install(snapshot: bytes | None) -> None:
        """Replace this process's in-process registrations by the driver's (:attr:`LaunchSpec.snapshot`)."""
        install_snapshot(snapshot)

    def describe(self, node: str) -> HostInfo:
        """Return the address, process id and cores, and a port that it holds until :meth:`close`.

        Every call returns the same port. Whoever binds it with ``SO_REUSEADDR``, as the stores of
        ``torch.distributed`` do, can listen on it; nobody else is given it.
        """
        if self._held_port is None:
            self._held_port = socket.socket()
            # Bound and not listening: the system gives the port to no other process, also not for a connection.
            self._held_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._held_port.bind(("", 0))
        return HostInfo(node, os.getpid(), int(self._held_port.getsockname()[1]), cores=_usable_cores())

    def build(self, context: WorkerContext, roles: Mapping[str, ClassWithInitArgs[Any]]) -> None:
        """Build a worker for each role; they see each other from the start.

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
            except Exception as error:  # noqa: BLE001  # it travels to the controller
                raise self._failure(role, "__init__", error) from None
            self.workers[role] = worker

    def call(
        self, role: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], outcome: Outcome = "send"
    ) -> Any:
        """Run ``method`` of the role's worker; a coroutine runs to its end in the host's event loop.

        Handles among the arguments are fetched, at any depth of lists, tuples and dicts, unless the method is
        registered to take them as they are. Of what the method is registered to write to it gets copies; another write
        in place to what it received is an error after the call.

        Args:
            role, method, args, kwargs: the call.
            outcome: ``send`` returns the result; with ``keep`` a DataProto stays here, and its
                description is returned; ``drop`` returns None.

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
                # Also after an exception: whoever catches it goes on with what the method left.
                arguments.check(f"{role}.{method}")
            if outcome == "drop":
                return None
            return self._kept(result) if outcome == "keep" else result
        except Exception as error:  # noqa: BLE001  # it travels to the controller
            raise self._failure(role, method, error) from None

    def _fetch_rows(self, cuts: Sequence[Any], timeout: float | None) -> list[Any]:
        found = getattr(self._store, "fetch_rows", None)
        return found(cuts, timeout) if found is not None else cut_here(self._store.fetch, cuts, timeout)

    def _kept(self, result: Any) -> Any:
        module = sys.modules.get("rollcast.protocol.batch")
        if module is None or not isinstance(result, module.DataProto):
            return result
        from rollcast.protocol.future import store_batch

        return store_batch(result, self._store.put)

    def close(self) -> None:
        """Call ``close()`` of each worker that has one, the last built first, and stop the event loop.

        Raises:
            WorkerRaised: for the last ``close()`` that raised; the others have run all the same.
        """
        with ExitStack() as closing:  # runs what it was given from the last to the first
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
        """Run a coroutine to its end, in a loop that keeps its tasks between calls.

        Coroutines of a worker with ``concurrent_async`` run in one loop, in a thread of its own, beside each other.
        Those of others run in this thread: a second thread would bring a second team of OpenMP threads, which slows
        torch down. Where this thread already runs a loop, as in a notebook, another has to do.
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
        """Cancel the coroutine that this thread waits for in :meth:`call`; return True if there was one."""
        future = self._beside.get(thread)
        return future is not None and future.cancel()

    @staticmethod
    def methods_beside(roles: Mapping[str, type]) -> frozenset[tuple[str, str]]:
        """Return role and name of the registered methods that run beside other calls of their process."""
        return frozenset(
            (role, name) for role, cls in roles.items() for name, _, _ in iter_registered(cls) if runs_beside(cls, name)
        )

    def runs_beside(self, role: str, method: str) -> bool:
        """Return True if calls of the method run beside others."""
        return role in self.workers and runs_beside(type(self.workers[role]), method)

    @staticmethod
    def _to_the_end(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> Any:
        try:
            return loop.run_until_complete(task)
        finally:
            if not task.done():  # interrupted; it would go on with the loop's next call
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
