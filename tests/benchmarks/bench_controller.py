"""The controller against the machine's limits: fresh memory, bare Ray calls, bare tensor operations.

Everything is measured in turns, in one run; the table shows medians. The batch is that of
``_large_batch.py``: 117 MB in 1024 rows.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import ray
import torch
from _large_batch import columns, uids
from _plain_workers import OnPairs, Plain
from _report import Comparison, write_report

from rollcast import ClassWithInitArgs, DataProto, ResourcePool, WorkerGroup
from rollcast.contracts.dispatch import MeshInfo, RankCall
from rollcast.contracts.pools import NodeResources
from rollcast.contracts.runtime import Host, HostInfo, LaunchSpec, Runtime
from rollcast.contracts.worker import WorkerContext
from rollcast.protocol import Cut, store_batch
from rollcast_ray.runtime import RayRuntime

WORKERS = 4
#: Clones at one time; 1.4 GB.
_KEPT = 12
Call = Callable[[], Any]


def seconds(call: Call) -> float:
    """How long the call takes, without what its result takes to be freed."""
    start = time.perf_counter()
    result = call()
    taken = time.perf_counter() - start
    del result
    return taken


def in_turns(calls: Sequence[Call], times: int, warm_up: int = 3, blocks: int = 3) -> list[float]:
    """The median of each call's seconds; the calls take turns in blocks, of which the first do not count."""
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(blocks):
        for call, taken in zip(calls, found, strict=True):
            taken += [seconds(call) for _ in range(warm_up + times)][warm_up:]
    return [statistics.median(taken) for taken in found]


class FreshClone:
    """``clone()`` of tensors into pages that are new to the process: earlier clones are kept meanwhile."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._kept: list[Any] = []

    def __call__(self) -> Any:
        """Clone."""
        if len(self._kept) == _KEPT:
            self._kept.clear()
        self._kept.append([tensor.clone() for tensor in self._tensors])
        return self._kept[-1]


class Stub(Runtime):
    """Hosts without processes: a call's result is there at once, and Ray costs nothing."""

    @classmethod
    def from_config(cls, config: Any, *, processes: int, run_dir: Path | None = None) -> Self:
        return cls()

    def nodes(self) -> list[NodeResources]:
        return []

    def launch(self, pool: ResourcePool, spec: LaunchSpec, timeout: float) -> list[Host]:
        size = pool.world_size
        return [Host(rank, HostInfo("stub", 0, 0), WorkerContext(rank, size)) for rank in range(size)]

    def call(self, host: Host, role: str, method: str, call: RankCall, outcome: str = "send") -> Any:
        if method == "query_mesh":
            return MeshInfo(host.handle, is_collect=True)
        return call.args[0] if call.args else None

    def put(self, value: Any) -> Any:
        return value

    def gather(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        return list(refs)

    def fetch(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        return list(refs)

    def install_plugins(self, hosts: Sequence[Host], snapshot: bytes | None, timeout: float) -> None:
        """Nothing to do."""

    def cancel(self, refs: Sequence[Any], hosts: Sequence[Host]) -> None:
        """Nothing to do."""

    def stop(self, hosts: Sequence[Host]) -> None:
        """Nothing to do."""

    def shutdown(self) -> None:
        """Nothing to do."""


def own_cost() -> list[Comparison]:
    """Our own time for a rank, as ranks grow; goals in microseconds a rank."""
    batch = DataProto.from_dict(
        {name: torch.zeros(2048, 8) for name in ("input_ids", "attention_mask", "position_ids", "old_log_probs")},
        {"uid": [str(row) for row in range(2048)]},
    )
    found = []
    for title, method, args in (
        ("an empty call", "nothing", ()),
        ("a batch of 5 columns, there and back", "echo", (batch,)),
    ):
        per_rank = {}
        for ranks in (4, 64, 1024):
            group = WorkerGroup(ResourcePool([ranks]), ClassWithInitArgs(Plain), runtime=Stub())
            call = getattr(group, method)
            taken = statistics.median([seconds(functools.partial(call, *args)) for _ in range(max(9, 2000 // ranks))])
            per_rank[ranks] = taken / ranks * 1e6
        found.append(Comparison(f"our own cost of {title}, 1024 ranks (us a rank)", per_rank[1024], 20.0, at_most=1.0))
        found.append(
            Comparison(f"the same of {title}: a rank of 1024 / of 64 (us)", per_rank[1024], per_rank[64], at_most=1.3)
        )
    return found


def chunked_remote(shards: int = 1024) -> Comparison:
    """A batch of as many remote shards, cut into as many pieces of 10 columns."""
    stored: list[Any] = []

    def put(value: Any) -> int:
        stored.append(value)
        return len(stored) - 1

    def fetch(cuts: Sequence[Cut], timeout: float | None) -> list[Any]:
        return [cut.of(stored[cut.ref]) for cut in cuts]

    shard = DataProto({f"column{number}": torch.zeros(4, 2) for number in range(10)})
    whole = DataProto.concat([store_batch(shard, put).bound(fetch) for _ in range(shards)])
    taken = statistics.median([seconds(functools.partial(whole.chunk, shards)) for _ in range(9)])
    return Comparison(
        f"chunk of remote columns: {shards} shards, {shards} pieces, 10 columns (s)", taken, 0.1, at_most=1.0
    )


def operations(batch: DataProto) -> list[Comparison]:
    """DataProto's operations against those of bare tensors on the same columns."""
    tensors = {name: batch[name] for name in columns_of(batch)}
    uid = batch["uid"]
    some = ["input_ids", "old_log_probs"]
    order = torch.randperm(len(batch))

    def ours() -> DataProto:
        parts = [part.select(some).joined(part.drop(some)) for part in batch.chunk(WORKERS)]
        return DataProto.concat(parts)

    def bare() -> Any:
        parts = [
            ({k: p[k] for k in some} | {k: p[k] for k in p if k not in some}, ids)
            for p, ids in zip(
                [
                    dict(zip(tensors, p, strict=True))
                    for p in zip(*(v.chunk(WORKERS) for v in tensors.values()), strict=True)
                ],
                np.array_split(uid, WORKERS),
                strict=True,
            )
        ]
        return {k: torch.cat([p[k] for p, _ in parts]) for k in tensors}, np.concatenate([ids for _, ids in parts])

    def bare_reorder() -> Any:
        return {k: v[order] for k, v in tensors.items()}, uid[order.numpy()]

    joined = in_turns([ours, bare], 8)
    moved = in_turns([lambda: batch.reordered(order), bare_reorder], 8)
    return [
        Comparison(
            "chunk, select, join, concat of 117 MB / bare tensors (ms)", *(t * 1e3 for t in joined), at_most=1.2
        ),
        Comparison("reorder of 117 MB / bare tensors (ms)", *(t * 1e3 for t in moved), at_most=1.2),
    ]


def columns_of(batch: DataProto) -> list[str]:
    """The tensor columns."""
    return [name for name in batch.keys() if name != "uid"]  # noqa: SIM118


def view_times(batch: DataProto) -> str:
    """What the operations cost that copy nothing."""
    some = ["input_ids", "old_log_probs"]
    first, second = batch.select(some), batch.drop(some)
    calls: dict[str, Call] = {
        "chunk into 4": lambda: batch.chunk(4),
        "select": lambda: batch.select(some),
        "joined": lambda: first.joined(second),
        "slice": lambda: batch[10:20],
    }
    return "views (us): " + ", ".join(
        f"{name} {statistics.median([seconds(call) for _ in range(300)]) * 1e6:.0f}" for name, call in calls.items()
    )


class _PeakMemory:
    """The most anonymous memory of this process (the object store is shared memory) inside the block."""

    def __enter__(self) -> _PeakMemory:
        self.before = self.peak = self._now()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(0.001):
            self.peak = max(self.peak, self._now())

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) << 10


class _Reader:
    """An actor without rollcast."""

    def small(self, shard: Mapping[str, Any]) -> Any:
        """One number a row."""
        return shard["old_log_probs"][:, 0].copy()


def bare_call(batch: DataProto, actors: Sequence[Any]) -> Call:
    """Store the batch as two shards with bare Ray, and have each actor read its own; two may share one."""

    def call() -> Any:
        parts = [{name: part[name].numpy() for name in columns_of(batch)} for part in batch.chunk(2)]
        refs = [ray.put(part) for part in parts]
        return ray.get([actor.small.remote(refs[2 * place // len(actors)]) for place, actor in enumerate(actors)])

    return call


def on_ray(batch: DataProto) -> list[Comparison]:
    """Data plane and calls."""

    clone = FreshClone([batch[name] for name in columns_of(batch)])
    with RayRuntime(num_cpus=3 * WORKERS) as runtime:

        def group(cls: type, size: int, *args: Any) -> WorkerGroup:
            return WorkerGroup(ResourcePool([size]), ClassWithInitArgs(cls, *args), runtime=runtime)

        four, two, pairs = group(Plain, 4), group(Plain, 2), group(OnPairs, 4, 2)
        handles = [host.handle for host in four.workers]
        with _PeakMemory() as memory:
            result = four.echo(batch)
        del result
        there = in_turns([lambda: four.small(batch), clone], 8)
        back = in_turns([lambda: four.echo(batch), clone], 8)
        bare = [ray.remote(_Reader).remote() for _ in range(4)]
        shared = in_turns(
            [
                lambda: pairs.small(batch),
                lambda: two.small(batch),
                bare_call(batch, bare),
                bare_call(batch, bare[:2]),
            ],
            8,
        )
        empty = in_turns([four.nothing, lambda: ray.get([handle.ping.remote() for handle in handles])], 1, 0, 2000)
    return [
        Comparison(
            "117 MB to 4 workers, a small column back / a fresh clone (ms)", *(t * 1e3 for t in there), at_most=1.5
        ),
        Comparison("117 MB to 4 workers and back whole / a fresh clone (ms)", *(t * 1e3 for t in back), at_most=3.0),
        Comparison(
            "117 MB to 2 + 2 workers that share shards / to 2 workers (ms)", *(t * 1e3 for t in shared[:2]), at_most=1.1
        ),
        Comparison("the same with bare Ray (ms)", *(t * 1e3 for t in shared[2:]), at_most=1.3),
        Comparison("our ratio of the two / bare Ray's", shared[0] / shared[1], shared[2] / shared[3], at_most=1.05),
        Comparison("an empty call on 4 workers / bare Ray calls (ms)", *(t * 1e3 for t in empty), at_most=1.15),
        Comparison(
            "driver's memory on the way there and back, at most / the batch (MB)",
            (memory.peak - memory.before) / 1e6,
            batch.nbytes / 1e6,
            at_most=1.3,
        ),
    ]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/controller.json"))
    options = parser.parse_args()
    load = os.getloadavg()[0]
    batch = DataProto.from_dict(columns(), {"uid": uids()})
    comparisons = [*on_ray(batch), *operations(batch), *own_cost(), chunked_remote()]
    notes = [view_times(batch), f"load of the machine before: {load:.1f} on {os.cpu_count()} cores"]
    write_report("the controller", comparisons, notes, options.output)


if __name__ == "__main__":
    main()
