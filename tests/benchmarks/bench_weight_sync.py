"""How long weights take to a replica on the same node, against one fresh copy of the same bytes.

    python tests/benchmarks/bench_weight_sync.py [--megabytes 500] [--repeats 5]

One process sends, another takes and checks every byte and loads nothing: what is timed is the way. All
figures are the best and the median of the repeats, in one run, one thread a process.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch

from rollcast.contracts.weights import WeightReport
from rollcast_serving.receiving import WeightTally
from rollcast_serving.server import IncomingWeights
from rollcast_serving.weight_sync import SyncSettings, weight_syncs


class Parameters:
    """An engine with parameters of one size, as a decoder's layers are."""

    def __init__(self, megabytes: int) -> None:
        size = (1 << 20) * megabytes // 4 // 64
        self.named = [(f"model.layers.{number}.weight", torch.randn(size)) for number in range(64)]

    def get_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.named


def take(jobs: Any, answers: Any) -> None:
    """The replica's process: goes through what comes."""
    torch.set_num_threads(1)
    while (job := jobs.get()) is not None:
        sync, source, version = job
        tally = WeightTally(IncomingWeights(sync, source))
        for _ in tally:
            pass
        answers.put((tally.report(version), psutil.Process().memory_full_info().uss))


class Target:
    """The replica, as the sync sees it."""

    node = "127.0.0.1"

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.jobs, self.answers = context.Queue(), context.Queue()
        self.process = context.Process(target=take, args=(self.jobs, self.answers))
        self.process.start()
        self.memory = 0

    def receive_weights(self, sync: str, source: Any, version: int) -> WeightReport:
        """Hand the job over, and wait."""
        self.jobs.put((sync, dict(source), version))
        report, self.memory = self.answers.get(timeout=120)
        return report  # type: ignore[no-any-return]


def measure(function: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Best and median seconds."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds), statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket-megabytes", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    engine, target = Parameters(arguments.megabytes), Target()
    total = sum(tensor.numel() * 4 for _, tensor in engine.named)

    def clone() -> None:
        kept = [tensor.clone() for _, tensor in engine.named]
        del kept

    rows: list[tuple[str, float, float]] = [("clone()", *measure(clone, arguments.repeats))]
    own = psutil.Process()
    for name in ("shared_memory", "collective", "disk"):
        settings = SyncSettings(arguments.bucket_megabytes << 20, 120.0)
        sync = weight_syncs.get(name)(engine, [target], settings)  # type: ignore[arg-type,list-item]
        version = 0

        def run(sync: Any = sync) -> None:
            nonlocal version
            version += 1
            asyncio.run(sync.sync(version))

        run()  # processes import, and buffers are made
        before = own.memory_full_info().uss
        rows.append((name, *measure(run, arguments.repeats)))
        if name == "shared_memory":
            held = sum(len(buffer.flat) for buffer in sync._buffers)
            print(
                f"buffers of both ends together: {held / 2**20:.0f} MiB; sender grew by "
                f"{(own.memory_full_info().uss - before) / 2**20:.1f} MiB over {arguments.repeats} syncs"
            )
        sync.close()
    target.jobs.put(None)
    target.process.join()
    for name, best, median in rows:
        print(
            f"{name:14} best {best:.3f} s ({total / best / 1e9:5.2f} GB/s)  median {median:.3f} s  "
            f"{best / rows[0][1]:.2f} of clone()"
        )


if __name__ == "__main__":
    main()
