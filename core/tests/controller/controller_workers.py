"""Worker classes for the tests of groups, in a module that Ray's workers can import."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast import Dispatch, DispatchMode, Execute, Worker, register
from rollcast.contracts.dispatch import Calls

if TYPE_CHECKING:
    from rollcast import DataProto  # most workers here start without torch, which takes them longest

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Refusal(ValueError):
    """An error of the user's own."""


class CannotTravel(Exception):
    """An error that no pickle can hold."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Halves(DispatchMode):
    """A mode that no distribution announces: equal parts in order, joined again."""

    name = "halves"

    def dispatch(self, worker_group: Any, data: DataProto) -> Calls:
        return Calls.each(data.chunk(worker_group.world_size))

    def collect(self, worker_group: Any, outputs: Any) -> DataProto:
        from rollcast import DataProto

        return DataProto.concat(list(outputs))


class Probe(Worker):
    """Shows where it stands, and fails in every way."""

    concurrent_async = False

    def __init__(self, label: str = "probe") -> None:
        self.label = label
        self.seen_at_start = (self.rank, self.world_size, sorted(self.colocated))
        self.count = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def place(self) -> dict[str, Any]:
        return {"rank": self.rank, "size": self.world_size, "pid": os.getpid(), "start": self.seen_at_start}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def environment(self, *names: str) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names or PLACE}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def niceness(self) -> int:
        return os.nice(0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def echo(self, *args: Any, **kwargs: Any) -> Any:
        return self.rank, args, kwargs

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def add(self, x: int, y: int = 0) -> int:
        return 100 * self.rank + x + y

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def only_first(self, x: int) -> tuple[int, int]:
        return self.rank, x

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def first_of_all(self, x: int) -> tuple[int, int]:
        return self.rank, x

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def waited(self, x: int) -> int:
        await asyncio.sleep(0)
        self.loop = getattr(self, "loop", None) or asyncio.get_running_loop()
        assert self.loop is asyncio.get_running_loop()
        return x + self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def later(self, x: int) -> int:
        self.count += 1
        return x + self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def calls(self) -> int:
        return self.count

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def addresses(self, batch: DataProto) -> Any:
        return batch["x"].data_ptr(), batch["x"].sum().item()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self, *ranks: int) -> str:
        if self.rank in ranks:
            logging.getLogger("probe").warning("about to fail on %d", self.rank)
            raise Refusal(f"rank {self.rank} refuses")
        return "fine"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_in_order(self, folder: str) -> None:
        """Rank 1 fails first, and rank 0 in consequence of it."""
        mark = Path(folder) / "failed"
        if self.rank == 1:
            mark.touch()
            raise Refusal("the first cause")
        while not mark.exists():
            time.sleep(0.01)
        time.sleep(0.2)
        raise ConnectionError("a consequence")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_oddly(self) -> None:
        raise CannotTravel("no pickle holds me")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def return_oddly(self) -> Any:
        return threading.Lock()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def fail_later(self) -> None:
        await asyncio.sleep(0)
        raise Refusal("after a while")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die(self, rank: int) -> None:
        if self.rank == rank:
            sys.stderr.write("last words\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self, rank: int, seconds: float) -> None:
        if self.rank == rank:
            time.sleep(seconds)


class Counter(Probe):
    """A role that others reach in its process."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def increase(self) -> int:
        self.count += 1
        return self.count


class Neighbour(Worker):
    """Built after a Counter, of which it has a reference."""

    def __init__(self) -> None:
        self.at_start = sorted(self.colocated)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def others(self) -> tuple[list[str], list[str]]:
        return self.at_start, sorted(self.colocated)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def read_counter(self) -> int:
        return self.colocated["counter"].count

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def role_name(self) -> str:
        return self.context.role


class Fussy(Worker):
    """Refuses to be built on one rank."""

    def __init__(self, rank: int) -> None:
        if self.rank == rank:
            raise Refusal(f"not on rank {rank}")


class Closing(Worker):
    """Leaves a line in a file when it is closed."""

    def __init__(self, file: str, fails: bool = False) -> None:
        self.file, self.fails = file, fails

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def touch(self) -> None: ...

    def close(self) -> None:
        with open(self.file, "a") as out:
            out.write(f"{self.context.role}\n")
        if self.fails:
            raise Refusal("cannot close")


class OnMesh(Worker):
    """Has a place in a mesh, and counts how often it is asked for it."""

    def __init__(self, tp: int) -> None:
        self.asked = 0
        self.register_mesh("m", self.rank // tp, self.rank % tp == 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def query_mesh(self, mesh_name: str) -> Any:
        self.asked += 1
        return super().query_mesh(mesh_name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def times_asked(self) -> int:
        return self.asked


class NotAWorker:
    """Derives from nothing."""


class UsesMode(Worker):
    """Asks a registry for a part in its own process."""

    @register(dispatch_mode=Halves())
    def double(self, data: DataProto) -> DataProto:
        return data.with_columns({"x": data["x"] * 2, "rank": data["x"] * 0 + self.rank})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def find_mode(self, name: str) -> str | None:
        from rollcast.contracts.dispatch import dispatch_modes

        return type(dispatch_modes.get(name)).__name__ if name in dispatch_modes else None
