"""Workers that fail in the middle of a call."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import torch

from rollcast import DataProto, Dispatch, Worker, register


class Patient(Worker):
    """Waits for long, and says when it is interrupted."""

    # Calls run in the main thread, the only one whose sleep can be interrupted; coroutines run there too.
    concurrent_async = False

    def __init__(self, folder: str = "") -> None:
        self.folder = Path(folder)

    def _wait(self) -> None:
        try:
            time.sleep(600)
        except Exception:  # as user code does; the interruption must pass all the same
            time.sleep(600)
        finally:
            (self.folder / f"ended-{self.rank}").touch()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die_or_wait(self, rank: int) -> None:
        (self.folder / f"started-{self.rank}").touch()
        if self.rank == rank:
            while len(list(self.folder.glob("started-*"))) < self.world_size:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        self._wait()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def raise_or_wait(self, rank: int) -> None:
        if self.rank == rank:
            raise ValueError("no more")
        self._wait()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def raise_or_wait_in_a_loop(self, rank: int) -> None:
        if self.rank == rank:
            await asyncio.sleep(0.2)
            raise ValueError("no more")
        try:
            await asyncio.sleep(600)
        finally:
            (self.folder / f"ended-{self.rank}").touch()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def raise_on_all(self) -> None:
        raise ValueError("all of us")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait_on(self, rank: int) -> None:
        if self.rank == rank:
            (self.folder / f"started-{self.rank}").touch()
            self._wait()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def mark(self, name: str) -> int:
        (self.folder / f"{name}-{self.rank}").touch()
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait_for_file(self, file: str) -> int:
        while not Path(file).exists():
            time.sleep(0.02)
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def large(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"y": torch.zeros(len(data), 1 << 20)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def small(self, data: DataProto) -> DataProto:
        return data.select(["i"])
