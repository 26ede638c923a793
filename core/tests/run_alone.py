"""What the core does without any plugin: `nox -s core` runs this file where no other distribution is installed."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import torch

from rollcast import ClassWithInitArgs, Dispatch, Execute, ResourcePool, Worker, WorkerGroup, register
from rollcast.protocol import DataProto
from rollcast.runtime.local import LocalRuntime


class Scaler(Worker):
    """Multiplies a column by a factor that the driver sets."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_factor(self, factor: float) -> float:
        self.factor = factor
        return self.factor

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def scale(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"scaled": batch["values"] * self.factor})


def main() -> None:
    """Run a worker group on the runtime `local`, and the commands that need no plugin."""
    others = [name for name in map(_name, importlib.metadata.distributions()) if name.startswith("rollcast-")]
    if others:
        raise SystemExit(f"these distributions are installed too: {', '.join(others)}")
    with LocalRuntime() as runtime:
        group = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Scaler, 1.0), runtime=runtime)
        _expect(group.set_factor(3.0), [3.0])
        scaled = group.scale(DataProto.from_dict({"values": torch.arange(4.0)}))
        _expect(scaled["scaled"].tolist(), [0.0, 3.0, 6.0, 9.0])
    for command in (["plugins", "--check"], ["doctor"], ["--help"]):
        subprocess.run([str(Path(sys.executable).with_name("rollcast")), *command], check=True)


def _name(distribution: importlib.metadata.Distribution) -> str:
    return str(distribution.metadata["Name"])


def _expect(value: object, expected: object) -> None:
    if value != expected:
        raise SystemExit(f"got {value!r} instead of {expected!r}")


if __name__ == "__main__":
    main()
