"""A worker whose results depend on what was done with it before."""

from __future__ import annotations

from pathlib import Path

import torch

from rollcast import DataProto, Dispatch, Worker, register


class Scaled(Worker):
    """Multiplies; the factor is its state."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def grow(self, by: float) -> float:
        self.factor *= by
        return self.factor

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def scale(self, data: DataProto, *, plus: float = 0.0) -> DataProto:
        return DataProto.from_dict({"y": data["x"] * self.factor + plus}, {"u": data["u"]}, {"factor": self.factor})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def refuse(self, data: DataProto) -> None:
        raise ValueError(f"{len(data)} rows are too many")

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def own(self, number: float) -> float:
        return number * self.factor

    def record_state(self, folder: str) -> None:
        if self.rank == 0:
            (Path(folder) / "factor").write_text(str(self.factor))

    def replay_state(self, folder: str) -> None:
        self.factor = float((Path(folder) / "factor").read_text())


class Forgetful(Scaled):
    """Leaves its state out of the record."""

    def record_state(self, folder: str) -> None:
        """Nothing."""

    def replay_state(self, folder: str) -> None:
        """Nothing."""


class Sharded(Scaled):
    """Writes a file on each rank, and one that is the same on all."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def disagree(self) -> None:
        self.factor += self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def folders(self) -> str:
        return self.folder

    def record_state(self, folder: str) -> None:
        self.folder = folder
        (Path(folder) / "same").write_text(str(self.factor))
        (Path(folder) / "shards").mkdir()
        (Path(folder) / "shards" / str(self.rank)).write_text(f"shard of rank {self.rank}")


def batch(rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows).float()}, {"u": [str(row) for row in range(rows)]})
