"""Processes that form process groups, for tests with several ranks."""

from __future__ import annotations

import secrets
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rollcast.contracts.worker import WorkerContext

__all__ = ["Ranks", "shared_ranks"]

#: Modules that are imported before forking, if installed, because importing them takes each rank seconds.
_PRELOADED = [
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "rollcast_testing.engine_ranks",
]


class Ranks:
    """A pool of processes that run functions on several ranks; the processes start on demand and are reused.

    Example::

        ranks = Ranks()
        first, second = ranks.run(train, world_size=2, steps=3)  # train(context, steps=3) on two ranks
        ranks.close()

    Args:
        timeout_s: time limit of a call in seconds; shorter than pytest's of a test, so that the error names the rank.
        grace_s: time that the other ranks have after one has raised; they may wait for it in a collective.
    """

    def __init__(self, timeout_s: float = 270.0, grace_s: float = 30.0) -> None:
        self._timeout_s, self._grace_s = timeout_s, grace_s
        self._connections: list[Any] = []
        self._processes: list[Any] = []

    def run(self, function: Callable[..., Any], *, world_size: int = 2, **kwargs: Any) -> list[Any]:
        """Run ``function(context, **kwargs)`` on every rank and return the results by rank.

        Args:
            function: function that other processes can import by its name; ``context`` has its rank.
            world_size: number of ranks. The processes leave their process group after each call, because the threads
                of gloo groups wake up many times a second even when idle.
            kwargs: keyword arguments; they and the results must be picklable.

        Raises:
            RuntimeError: the function raised on a rank (the message has the tracebacks), or a rank did not answer in
                time; in the latter case, the processes are ended.
        """
        size = world_size
        self._start(size)
        port = _free_port()
        for rank, connection in enumerate(self._connections[:size]):
            context = WorkerContext(
                rank=rank, world_size=size, local_rank=rank, local_world_size=size, master_port=port
            )
            connection.send((function, context, kwargs))
        answers = self._receive(size)
        failures = [f"rank {rank}: {text}" for rank, (good, text) in sorted(answers.items()) if not good]
        missing = sorted(set(range(size)) - set(answers))
        if missing:
            self.close()
            what = f"died, or did not answer within {self._timeout_s:.0f} s or {self._grace_s:.0f} s after a failure"
            raise RuntimeError("\n".join([f"ranks {missing} of {size} {what}", *failures]))
        if failures:
            raise RuntimeError("\n".join(failures))
        return [answers[rank][1] for rank in range(size)]

    def _receive(self, size: int) -> dict[int, tuple[bool, Any]]:
        """Return the answers by rank, as far as they come in time: true and the result, or false and a traceback."""
        ranks: dict[Any, int] = {connection: rank for rank, connection in enumerate(self._connections[:size])}
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + self._timeout_s
        while ranks:
            ready: list[Any] = wait(list(ranks), max(deadline - time.monotonic(), 0.0))
            if not ready:
                break
            for connection in ready:
                rank = ranks.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except EOFError:  # its process died
                    is_good = False
                else:
                    is_good = answers[rank][0]
                if not is_good:
                    deadline = min(deadline, time.monotonic() + self._grace_s)
        return answers

    def close(self) -> None:
        """End the processes; a later call starts new ones."""
        for process in self._processes:
            process.kill()
            process.join()
        self._connections, self._processes = [], []

    def _start(self, count: int) -> None:
        forking = mp.get_context("forkserver")
        forking.set_forkserver_preload(_PRELOADED)
        while len(self._processes) < count:
            ours, theirs = forking.Pipe()
            process = forking.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._connections.append(ours)
            self._processes.append(process)


_shared: list[Ranks] = []


def shared_ranks() -> Ranks:
    """Return this process's shared :class:`Ranks`, which run until it exits, because starting them is slow."""
    if not _shared:
        _shared.append(Ranks())
    return _shared[0]


def _free_port() -> int:
    """Return a free port outside the range from which the kernel assigns ports, so that no other process gets it."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)  # tests may seed `random`, and processes must differ
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def _serve(connection: Any) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            function, context, kwargs = connection.recv()
        except EOFError:
            return
        try:
            answer = True, function(context, **kwargs)
        except Exception:  # noqa: BLE001  # the caller raises it
            answer = False, traceback.format_exc()
        connection.send(answer)
        if dist.is_initialized():
            dist.destroy_process_group()
