"""Processes that form process groups, for tests with several ranks."""

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
        timeout_s: time limit of a call in seconds.
    """

    def __init__(self, timeout_s: float = 300.0) -> None:
        self._timeout_s = timeout_s
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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
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
