"""Processes that form process groups, for tests of what several ranks do together."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rollcast.contracts.worker import WorkerContext

__all__ = ["Ranks", "shared_ranks"]


class Ranks:
    """Processes that stay up and call what they are sent; they are started as they are needed.

    Example::

        ranks = Ranks()
        first, second = ranks.run(train, world_size=2, steps=3)  # train(context, steps=3) on two ranks
        ranks.close()

    Args:
        timeout_s: after which a call is given up.
    """

    def __init__(self, timeout_s: float = 300.0) -> None:
        self._timeout_s = timeout_s
        self._world_size = 0
        self._port = 0
        self._connections: list[Any] = []
        self._processes: list[Any] = []

    def run(self, function: Callable[..., Any], *, world_size: int = 2, **kwargs: Any) -> list[Any]:
        """The results of ``function(context, **kwargs)`` by rank.

        Args:
            function: importable by its name in another process; ``context`` says which rank it is on.
            world_size: ranks to run on. With another number than in the last call, the processes leave
                their process group first.
            kwargs: can be pickled, as can the results.

        Raises:
            RuntimeError: it raised on some rank, with the tracebacks, or a rank did not answer in time. In the
                latter case the processes are ended.
        """
        size = world_size
        self._start(size)
        fresh = size != self._world_size
        if fresh:
            self._world_size, self._port = size, _free_port()
        for rank, connection in enumerate(self._connections[:size]):
            context = WorkerContext(
                rank=rank, world_size=size, local_rank=rank, local_world_size=size, master_port=self._port
            )
            connection.send((function, context, fresh, kwargs))
        answers: list[tuple[bool, Any]] = []
        for rank, connection in enumerate(self._connections[:size]):
            if not connection.poll(self._timeout_s):
                self.close()
                known = "\n".join(text for good, text in answers if not good)
                raise RuntimeError(f"rank {rank} of {size} did not answer within {self._timeout_s:.0f} s\n{known}")
            answers.append(connection.recv())
        failures = [f"rank {rank}: {text}" for rank, (good, text) in enumerate(answers) if not good]
        if failures:
            raise RuntimeError("\n".join(failures))
        return [result for _, result in answers]

    def close(self) -> None:
        """End the processes; another call starts new ones."""
        for process in self._processes:
            process.kill()
            process.join()
        self._connections, self._processes, self._world_size = [], [], 0

    def _start(self, count: int) -> None:
        spawn = mp.get_context("spawn")
        while len(self._processes) < count:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._connections.append(ours)
            self._processes.append(process)


_shared: list[Ranks] = []


def shared_ranks() -> Ranks:
    """This process's own :class:`Ranks`, up until it ends: starting them takes longer than most tests."""
    if not _shared:
        _shared.append(Ranks())
    return _shared[0]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def _serve(connection: Any) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            function, context, fresh, kwargs = connection.recv()
        except EOFError:
            return
        if fresh and dist.is_initialized():
            dist.destroy_process_group()
        try:
            connection.send((True, function(context, **kwargs)))
        except Exception:  # noqa: BLE001  # the caller raises it
            connection.send((False, traceback.format_exc()))
