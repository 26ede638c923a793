"""Workers that write in place, chain and run coroutines, in a module that Ray's workers can import."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from controller_workers import Halves

from rollcast import DataProto, Dispatch, Worker, register
from rollcast.contracts.dispatch import Calls, DispatchMode, DispatchTarget, Expected, RankCall

DEADLINE_S = 60.0


def wait_for(file: Path) -> None:
    """Wait until another process has made the file."""
    end = time.monotonic() + DEADLINE_S
    while not file.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{file} was not made")
        time.sleep(0.005)


class Rows(Halves):
    """Equal parts; the length of the result is known before the calls end."""

    name = "rows"

    def dispatch(self, worker_group: Any, data: DataProto, *others: Any) -> Calls:
        return Calls([RankCall((part, *others)) for part in data.chunk(worker_group.world_size)])

    def expect(self, worker_group: DispatchTarget, calls: Calls) -> Expected:
        rows = [len(call.args[0]) for call in calls.per_rank if call is not None]
        return Expected(range(len(rows)), rows, sum(rows))


class Whole(DispatchMode):
    """Every rank gets the batch; rank 0's result counts."""

    name = "whole"

    def dispatch(self, worker_group: DispatchTarget, *args: Any, **kwargs: Any) -> Calls:
        return Calls([RankCall(args, kwargs)] * worker_group.world_size)

    def collect(self, worker_group: DispatchTarget, outputs: Any) -> Any:
        return list(outputs)


def write(way: str, tensor: torch.Tensor) -> None:
    """Write to a tensor in place in one of many ways."""
    with torch.no_grad():
        match way:
            case "add_":
                tensor.add_(1)
            case "setitem":
                tensor[0] = 7
            case "view":
                tensor.view(-1)[-1:].mul_(3)
            case "detach":
                tensor.detach().neg_()
            case "out":
                torch.add(tensor, 1, out=tensor)
            case "foreach":
                torch._foreach_mul_([tensor], 2.0)
            case "data":
                tensor.data.add_(1)
            case "numpy":
                tensor.numpy()[:] = 9


WAYS = ("add_", "setitem", "view", "detach", "out", "foreach", "data", "numpy")


class Careless(Worker):
    """Writes to what it receives."""

    @register(dispatch_mode=Whole())
    def write(self, data: DataProto, way: str, column: str = "x") -> list[float]:
        """Write without saying so."""
        value = data[column]
        write(way, value.values() if value.is_nested else value)
        return data[column].tolist() if not value.is_nested else []

    @register(dispatch_mode=Whole(), mutates=("x",))
    def write_own(self, data: DataProto, way: str) -> list[float]:
        """Write to a copy."""
        write(way, data["x"])
        found: list[float] = data["x"].flatten().tolist()
        return found

    @register(dispatch_mode=Whole(), mutates=True)
    def write_all(self, data: DataProto, weights: dict[str, torch.Tensor]) -> list[float]:
        """Write to copies of everything."""
        data["x"].add_(1)
        weights["w"].mul_(2)
        return [float(data["x"].sum()), float(weights["w"].sum())]

    @register(dispatch_mode=Whole(), mutates=("nothing_of_this_name",))
    def write_others(self, data: DataProto) -> None:
        """Write to a column that is not declared."""
        data["x"].add_(1)

    @register(dispatch_mode=Whole())
    def read(self, data: DataProto) -> list[float]:
        """Return a column."""
        found: list[float] = data["x"].flatten().tolist()
        return found

    @register(dispatch_mode=Whole())
    def write_argument(self, weights: dict[str, Any]) -> None:
        """Write to a tensor among the arguments."""
        weights["layers"][0].add_(1)

    @register(dispatch_mode=Whole())
    def edit(self, names: list[str], options: dict[str, Any], data: DataProto) -> int:
        """Edit containers, which are the worker's own."""
        names.append("more")
        options["nested"]["key"] = 1
        data.meta_info["seen"] = True
        data.batch["y"] = data["x"] + 1
        data["info"][0]["touched"] = True
        return len(names)

    @register(dispatch_mode=Whole())
    def write_array(self, array: Any) -> None:
        """Write to an array."""
        array[0] = 3

    @register(dispatch_mode=Rows())
    def keep(self, data: DataProto) -> DataProto:
        """Keep rows."""
        return data

    @register(dispatch_mode=Whole())
    def count(self, nested: dict[str, Any]) -> list[int]:
        """Read batches that lie in containers."""
        return [len(nested["batches"][0]), int(nested["batches"][0]["x"].sum())]

    @register(dispatch_mode=Whole())
    def share(self, *values: Any) -> float:
        """Read tensors, bytes and batches that all ranks get."""
        weights, blob, batch = values
        return float(weights["w"].sum()) + len(blob) + float(batch["x"].sum())


class Stage(Worker):
    """One stage of a chain; waits for files that other stages make."""

    @register(dispatch_mode=Rows(), rows="same")
    def meet(self, data: DataProto, folder: str, mine: str, others: str) -> DataProto:
        """End only if the other stage has started."""
        (Path(folder) / f"{mine}{self.rank}").touch()
        wait_for(Path(folder) / f"{others}0")
        return data.select(["x"]).with_columns({mine: data["x"] + 1}).drop(["x"])

    @register(dispatch_mode=Rows(), rows="same")
    def after(self, data: DataProto, folder: str) -> DataProto:
        """End when the driver says so."""
        wait_for(Path(folder) / "go")
        return data.with_columns({"y": data["x"] * 2})

    @register(dispatch_mode=Rows(), rows="same")
    def plus(self, data: DataProto) -> DataProto:
        """Add one."""
        return DataProto({"z": data["y"] + 1})

    @register(dispatch_mode=Rows(), rows="same")
    def fewer(self, data: DataProto) -> DataProto:
        """Break the promise of a row for each row."""
        return data.slice(0, 1)

    @register(dispatch_mode=Rows(), rows="same")
    def fail(self, data: DataProto) -> DataProto:
        """Fail."""
        raise ValueError("this stage breaks")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ranked(self, folder: str) -> int:
        """Return the rank; rank 0 last."""
        if self.rank == 0 and self.world_size > 1:
            wait_for(Path(folder) / "second")
        return self.rank


class Asynchronous(Worker):
    """Coroutines that wait for each other."""

    def __init__(self) -> None:
        self.event: asyncio.Event | None = None
        self.order: list[str] = []

    def _get_event(self) -> asyncio.Event:
        self.event = self.event or asyncio.Event()
        return self.event

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def wait(self) -> str:
        """End when :meth:`release` has run."""
        self.order.append("wait")
        await asyncio.wait_for(self._get_event().wait(), DEADLINE_S)
        self.order.append("released")
        return "released"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def release(self) -> None:
        """Let :meth:`wait` end."""
        self._get_event().set()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def plain(self) -> Sequence[str]:
        """A call that is no coroutine."""
        return list(self.order)


class OneByOne(Worker):
    """Coroutines that do not run beside others."""

    concurrent_async = False

    def __init__(self) -> None:
        self.running = 0
        self.most = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def step(self) -> tuple[int, str]:
        """Return how many ran at one time, and the name of the thread."""
        import threading

        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(20):
            await asyncio.sleep(0)
        self.running -= 1
        return self.most, threading.current_thread().name
