"""Processes that form a process group and run what the tests send them."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from rollcast.controller.worker import WorkerContext


def _serve(rank: int, world_size: int, port: int, connection: Any) -> None:
    torch.set_num_threads(1)
    context = WorkerContext(
        rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, master_port=port
    )
    while True:
        call = connection.recv()
        if call is None:
            return
        function, kwargs = call
        try:
            connection.send((True, function(context, **kwargs)))
        except Exception:
            connection.send((False, traceback.format_exc()))


class MegatronRanks:
    """Processes of one process group; :meth:`run` calls a function on all of them."""

    def __init__(self, world_size: int = 2) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        spawn = mp.get_context("spawn")
        pipes = [spawn.Pipe() for _ in range(world_size)]
        self.connections = [ours for ours, _ in pipes]
        self.processes = [
            spawn.Process(target=_serve, args=(rank, world_size, port, pipes[rank][1]), daemon=True)
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def run(self, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """The results of ``function(context, **kwargs)`` by rank."""
        for connection in self.connections:
            connection.send((function, kwargs))
        answers: list[tuple[bool, Any]] = []
        for rank, connection in enumerate(self.connections):
            if not connection.poll(300):
                self.close()
                pytest.fail(f"rank {rank} did not answer: {[a[1] for a in answers]}")
            answers.append(connection.recv())
        failures = [text for good, text in answers if not good]
        if failures:
            pytest.fail("\n".join(failures))
        return [result for _, result in answers]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
