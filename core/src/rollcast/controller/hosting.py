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
import time
import traceback
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from rollcast.contracts.marks import mark
from rollcast.contracts.runtime import CallFailure, HostInfo, Outcome, Store, WorkerRaised
from rollcast.contracts.worker import ClassWithInitArgs, WorkerContext
from rollcast.controller.dispatch import registered
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


class KeepHere:
    """The store of a runtime with one process: a value is its own reference."""

    def put(self, value: Any) -> Any:
        """Return the value."""
        return value

    def fetch(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        """Return the values."""
        return list(refs)


def _is_handle(value: Any) -> bool:
    """Return True for a :class:`~rollcast.protocol.future.DataProtoFuture`."""
    # Whoever has not imported the class has no instance; importing it here would cost torch.
    module = sys.modules.get("rollcast.protocol.future")
    return module is not None and isinstance(value, module.DataProtoFuture)


class WorkerHost:
    """Holds one process's workers and runs calls on them.

    Args:
        store: where results with outcome ``keep`` stay.
    """

    def __init__(self, store: Store | None = None) -> None:
        self.workers: dict[str, Worker] = {}
        self._store = store or KeepHere()
        self._context = WorkerContext()
        self._recent = _RecentLog()
        self._loop: asyncio.AbstractEventLoop | None = None

    @staticmethod
    def install(snapshot: bytes | None) -> None:
        """Replace this process's in-process registrations by the driver's (:attr:`LaunchSpec.snapshot`)."""
        install_snapshot(snapshot)

    @staticmethod
    def describe(node: str) -> HostInfo:
        """Return the address, process id and a free port of this process."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return HostInfo(node, os.getpid(), int(probe.getsockname()[1]))

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

        Handles among the arguments are fetched, unless the method is registered to take them as they
        are.

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
            entry = registered(function)
            fetch = entry is None or entry.materialize_futures
            arrived = [self._arrived(value, fetch) for value in args]
            named = {key: self._arrived(value, fetch) for key, value in kwargs.items()}
            with mark(f"{role}.{method}"):
                result = function(*arrived, **named)
                if inspect.iscoroutine(result):
                    result = self._run(result)
            if outcome == "drop":
                return None
            return self._kept(result) if outcome == "keep" else result
        except Exception as error:  # noqa: BLE001  # it travels to the controller
            raise self._failure(role, method, error) from None

    def _arrived(self, value: Any, fetch: bool) -> Any:
        if not _is_handle(value):
            return value
        handle = value.bind(self._store.fetch)
        return handle.get() if fetch else handle

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
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in this thread, in a loop that keeps its tasks between calls.

        A second thread would bring a second team of OpenMP threads, which slows torch down; it is
        used only where this thread already runs a loop, as in a notebook.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        task = self._loop.create_task(coroutine)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._to_the_end(self._loop, task)
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self._to_the_end, self._loop, task).result()

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
