"""`kill -9` of one of two replicas under 64 requests: how long until it is back, against its first start.

    python tests/benchmarks/bench_replica_kill.py [--rollout hf] [--kills 3]

The other replica goes on meanwhile, so the two starts do not have the machine alike: the goal allows for it.
The rollout is any that is installed beside rollcast-serving.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from _report import Comparison, write_report

from rollcast.contracts.rollout import RolloutOutput, RolloutRequest, SamplingParams, rollouts
from rollcast_serving.launcher import ReplicaAddress, ReplicaProcess, ReplicaSpec
from rollcast_serving.manager import RoutingSettings, ServerManager
from rollcast_testing.tiny import tiny_model_folder

REQUESTS, TOKENS, KILL_AFTER = 64, 64, 16
PAD, EOS = 0, 2


def make_requests() -> list[RolloutRequest]:
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    return [
        RolloutRequest(f"request-{row}", [4 + (7 * row + 3 * place) % 80 for place in range(16)], sampling)
        for row in range(REQUESTS)
    ]


class Pair:
    """Two replicas, one of which is killed now and then."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self.spec = spec
        self.processes: dict[int, ReplicaProcess] = {}
        self.killed_at = 0.0
        self.back_after: list[float] = []

    def start(self, index: int) -> tuple[ReplicaAddress, float]:
        """A replica's address, and the seconds that it took."""
        begin = time.perf_counter()
        self.processes[index] = ReplicaProcess(self.spec, index)
        return self.processes[index].wait_ready(), time.perf_counter() - begin

    async def revive(self, index: int) -> ReplicaAddress:
        """Start a replica again; the manager calls it for one that died."""
        address, _ = await asyncio.to_thread(self.start, index)
        self.back_after.append(time.perf_counter() - self.killed_at)
        return address

    def kill(self) -> None:
        """Kill the second."""
        self.killed_at = time.perf_counter()
        os.kill(self.processes[1].popen.pid, signal.SIGKILL)

    def stop(self) -> None:
        """End both."""
        for process in self.processes.values():
            process.stop()


async def measure(pair: Pair, addresses: list[ReplicaAddress], kills: int) -> tuple[float, list[int]]:
    """Seconds of 64 requests undisturbed, and how many were answered as then under each kill."""
    manager = ServerManager(addresses, RoutingSettings(), pair.revive)
    try:
        begin = time.perf_counter()
        expected = await manager.generate_many(make_requests())
        undisturbed = time.perf_counter() - begin
        answered: list[int] = []
        for _ in range(kills):
            outputs = await manager.generate_many(
                make_requests(), lambda done, of: pair.kill() if done == KILL_AFTER else None
            )
            answered.append(sum(map(same, outputs, expected)))
            await manager.settle()
        return undisturbed, answered
    finally:
        await manager.close()


def same(one: RolloutOutput, other: RolloutOutput) -> bool:
    return list(one.sequences[0].token_ids) == list(other.sequences[0].token_ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rollout", default="hf")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/replica_kill.json"))
    options = parser.parse_args()
    schema = rollouts.get(options.rollout, requested_by="--rollout").config_schema
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model_folder(Path(folder) / "model", hidden=64)
        spec = ReplicaSpec(
            asdict(schema()) | {"name": options.rollout}, str(model), 0, PAD, EOS, env={"OMP_NUM_THREADS": "1"},
            log_dir=folder,
        )  # fmt: skip
        pair = Pair(spec)
        try:
            started = [pair.start(index) for index in range(2)]
            undisturbed, answered = asyncio.run(measure(pair, [address for address, _ in started], options.kills))
        finally:
            pair.stop()
    first = statistics.median(seconds for _, seconds in started)
    back = statistics.median(pair.back_after)
    comparisons = [
        Comparison("seconds from the kill until it answers again, against its first start", back, first, at_most=1.5),
        Comparison("requests of 64 with their answer, the fewest of all kills", min(answered), REQUESTS, at_least=1.0),
    ]
    notes = [f"back after {', '.join(f'{each:.2f}' for each in pair.back_after)} s; 64 requests undisturbed take "
             f"{undisturbed:.2f} s"]  # fmt: skip
    write_report(
        f"kill -9 of one of two {options.rollout} replicas under 64 requests", comparisons, notes, options.output
    )


if __name__ == "__main__":
    main()
