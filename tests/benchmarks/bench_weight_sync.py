"""How long weights take to a replica on the same node, against one fresh copy of the same bytes.

    python tests/benchmarks/bench_weight_sync.py [--megabytes 500] [--repeats 5]

One process sends, another takes and checks every byte and loads nothing: what is timed is the way. The parameters are
float32; a case that names bfloat16 casts them for a replica that holds them so, and its bytes are counted as float32. All
figures are the best and the median of the repeats, in one run, one thread a process; cases and ``clone()`` take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch

from rollcast.contracts.weights import WeightReport
from rollcast_serving.casting import WeightCast
from rollcast_serving.contracts.weight_sync import SyncSettings, weight_syncs
from rollcast_serving.receiving import WeightTally
from rollcast_serving.server import IncomingWeights


class Parameters:
    """An engine with parameters of one size, as a decoder's layers are."""

    def __init__(self, megabytes: int) -> None:
        rows = (1 << 20) * megabytes // 4 // 64 // 1024
        self.named = [(f"model.layers.{number}.weight", torch.randn(rows, 1024)) for number in range(64)]

    def get_adapter(self) -> None:
        return

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
        self.process = context.Process(target=take, args=(self.jobs, self.answers), daemon=True)
        self.process.start()
        self.memory = 0

    def receive_weights(self, sync: str, source: Any, version: int) -> WeightReport:
        """Hand the job over, and wait."""
        self.jobs.put((sync, dict(source), version))
        report, self.memory = self.answers.get(timeout=120)
        return report  # type: ignore[no-any-return]


def time_once(function: Callable[[], Any]) -> float:
    """Seconds that one call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


CASES = {
    "shared_memory": ("shared_memory", None),
    "shared_memory to bfloat16": ("shared_memory", WeightCast("bfloat16")),
    "collective": ("collective", None),
    "disk": ("disk", None),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket-megabytes", type=int, default=64)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    engine, target = Parameters(arguments.megabytes), Target()
    total = sum(tensor.numel() * 4 for _, tensor in engine.named)

    libc = ctypes.CDLL(None)

    def clone() -> None:
        kept = [tensor.clone() for _, tensor in engine.named]
        del kept
        libc.malloc_trim(0)  # so that the next clone is fresh, whatever the allocator would keep

    own = psutil.Process()
    for case in arguments.cases:
        name, cast = CASES[case]
        settings = SyncSettings(arguments.bucket_megabytes << 20, 120.0, cast=cast)
        sync = weight_syncs.get(name)(engine, [target], settings)  # type: ignore[arg-type,list-item]

        def run(sync: Any = sync) -> None:
            asyncio.run(sync.sync(1))

        run()  # processes import, and buffers are made
        before = own.memory_full_info().uss
        cloned, synced = [], []
        for _ in range(arguments.repeats):
            cloned.append(time_once(clone))
            synced.append(time_once(run))
        best, median = min(synced), statistics.median(synced)
        print(
            f"{case:25} best {best:.3f} s ({total / best / 1e9:5.2f} GB/s)  median {median:.3f} s  "
            f"{best / min(cloned):.2f} of clone(), {min(cloned):.3f} s; of the medians {median / statistics.median(cloned):.2f}"
        )
        if name == "shared_memory":
            held = sum(buffer.size for buffer in sync._buffers)
            print(
                f"    buffers of both ends together: {held / 2**20:.0f} MiB; sender grew by "
                f"{(own.memory_full_info().uss - before) / 2**20:.1f} MiB over {arguments.repeats} syncs"
            )
        sync.close()
    target.jobs.put(None)
    target.process.join()


if __name__ == "__main__":
    main()
