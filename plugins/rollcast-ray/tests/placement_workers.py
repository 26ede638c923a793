"""Worker classes for the tests of places, in a module that Ray's workers can import."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

from rollcast import ClassWithInitArgs, Dispatch, ResourcePool, Worker, register
from rollcast_ray import RayWorkerGroup

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


class Placed(Worker):
    """Says where it is, and counts."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def node(self) -> str:
        return self.context.node

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def environment(self, *names: str) -> tuple[str | None, ...]:
        return tuple(os.environ.get(name) for name in names or PLACE)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def log_level(self) -> tuple[int, int]:
        return logging.getLogger("rollcast").level, logging.getLogger().level

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def device(self) -> tuple[str | None, int | None]:
        return os.environ.get("CUDA_VISIBLE_DEVICES"), self.context.device_index

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die_on(self, rank: int) -> None:
        if self.rank == rank:
            os.write(2, f"last words of rank {rank}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def increase(self) -> int:
        self.count += 1
        return self.count


class Parent(Worker):
    """Holds a group of its own."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_children(self, size: int) -> list[int]:
        self.children = RayWorkerGroup(ResourcePool([size], name="nested"), ClassWithInitArgs(Placed, 10 * self.rank))
        return self.children.pid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ask_children(self) -> list[int]:
        return self.children.increase()


class Unwilling(Worker):
    """Cannot be built."""

    def __init__(self) -> None:
        raise RuntimeError("not today")


class Summing(Worker):
    """Works with what its neighbour holds, in the same process."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def neighbours_count(self) -> Any:
        neighbour = self.colocated["placed"]
        assert isinstance(neighbour, Placed)
        return neighbour.count
