"""`kill -9` of a random worker at random moments of a run on Ray: does it end by itself, where the undisturbed run ends?

    python tests/benchmarks/bench_worker_kill.py [--kills 20] [--workers 2] [--seed 0]

Each run loses one worker, at a random moment of the start or of a step, all of them spread evenly, and is never touched
again. It counts if it ends with exit code 0, has recorded one recovery, and has metrics equal to the
undisturbed run's in every step: those before the checkpoint, which it keeps, and those from the checkpoint on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from _report import Comparison, write_report

STEPS, SAVE_FREQ = 9, 3
#: Longest time of a run, in seconds.
_RUN_S = 900.0
_LOOK_S = 0.02
_NOT_WORKERS = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")


@dataclass(frozen=True)
class Ended:
    """How a run with a kill has ended.

    Attributes:
        code: exit code.
        stage: process that was killed, by the title that Ray gives it.
        recoveries: lines of ``recoveries.jsonl``.
        same: metrics are the undisturbed run's.
        seconds: from the kill to the end of the first step after it, as the run measured it.
    """

    code: int
    stage: str
    recoveries: list[dict[str, Any]]
    same: bool
    seconds: float

    @property
    def good(self) -> bool:
        """True if the run has recovered by itself, to the same metrics."""
        return self.code == 0 and self.same and len(self.recoveries) == 1


def start(folder: Path, workers: int) -> subprocess.Popen[bytes]:
    """The command, in a process of its own; what it says goes to a file beside its folder."""
    command = [
        *(sys.executable, "-m", "rollcast", "train", "recipe=quickstart", f"run_dir={folder}", "runtime=ray"),
        *(f"placement.n_gpus_per_node={workers}", "trainer.warm_start=null", "model.random_init=true"),
        *("data.train_batch_size=8", "actor.ppo_mini_batch_size=4", "rollout.n=4", "data.val_max_samples=16"),
        *(f"trainer.total_steps={STEPS}", f"trainer.save_freq={SAVE_FREQ}", "trainer.test_freq=3"),
        *("trainer.export=false", "runtime.threads_per_worker=1", "trackers=[jsonl]"),
    ]
    environment = {**os.environ, "RAY_ADDRESS": "", "OMP_NUM_THREADS": "1"}
    with folder.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)


def find_workers(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Processes of workers; Ray calls them by their actor, or by the method that runs."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            title = (child.cmdline() or [""])[0]
        except psutil.Error:  # it has just ended
            continue
        if title.startswith("ray::") and not title.startswith(_NOT_WORKERS):
            found.append(child)
    return found


def wait_for(process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    """Wait for a condition.

    Raises:
        RuntimeError: the run ended before.
    """
    deadline = time.perf_counter() + _RUN_S
    while not condition():
        if process.poll() is not None or time.perf_counter() > deadline:
            raise RuntimeError(f"the run ended (code {process.poll()}) or hangs; see its log")
        time.sleep(_LOOK_S)


def wait_for_step(process: subprocess.Popen[bytes], folder: Path, step: int, workers: int) -> None:
    """Wait until a step is recorded; -1 stands for the first processes of all workers."""
    if step < 0:
        wait_for(process, lambda: len(find_workers(process)) >= workers)
    else:
        wait_for(process, lambda: len(read_lines(folder / "metrics.jsonl")) > step)


def run_undisturbed(folder: Path, workers: int) -> list[float]:
    """Seconds of the start and of each step."""
    process = start(folder, workers)
    wait_for_step(process, folder, -1, workers)
    times = [time.perf_counter()]
    for step in range(STEPS + 1):
        wait_for_step(process, folder, step, workers)
        times.append(time.perf_counter())
    process.wait(_RUN_S)
    return [after - before for before, after in pairwise(times)]


def run_killed(
    folder: Path, workers: int, moment: float, seconds: Sequence[float], generator: random.Random
) -> tuple[int, str]:
    """Exit code of a run, one worker of which is killed, and that worker's title.

    Args:
        moment: number of the part of a run, counted from its start, and share of that part.
        seconds: of each part.
    """
    part = int(moment)
    process = start(folder, workers)
    wait_for_step(process, folder, part - 1, workers)
    time.sleep((moment - part) * seconds[part])
    victim = generator.choice(find_workers(process))
    title = victim.cmdline()[0]
    victim.kill()
    return process.wait(_RUN_S), title


def read_lines(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def comparable(folder: Path) -> list[dict[str, Any]]:
    """The metrics that have to repeat."""
    measured = ("time/", "perf/", "recovery/")
    return [
        {key: value for key, value in row.items() if not key.startswith(measured) and not key.endswith("_per_s")}
        for row in read_lines(folder / "metrics.jsonl")
    ]


def measure(folder: Path, workers: int, kills: int, seed: int) -> list[Ended]:
    """All runs."""
    generator = random.Random(seed)
    whole = folder / "whole"
    seconds = run_undisturbed(whole, workers)
    expected, ended = comparable(whole), []
    for number in range(kills):
        run_dir = folder / f"killed_{number}"
        moment = (number + generator.random()) / kills * len(seconds)
        code, title = run_killed(run_dir, workers, moment, seconds, generator)
        took = [row["recovery/seconds"] for row in read_lines(run_dir / "metrics.jsonl") if "recovery/seconds" in row]
        recoveries = read_lines(run_dir / "recoveries.jsonl")
        ended.append(Ended(code, title, recoveries, comparable(run_dir) == expected, sum(took)))
        sys.stderr.write(f"{number + 1} of {kills}: {ended[-1]}\n")
        if not ended[-1].good:
            sys.stderr.write(run_dir.with_suffix(".log").read_text(errors="replace")[-4000:] + "\n")
    return ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/worker_kill.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ended = measure(Path(folder), options.workers, options.kills, options.seed)
    good = sum(each.good for each in ended)
    name = "runs that finished unattended with the undisturbed run's metrics, of all that lost a worker"
    comparisons = [Comparison(name, good, len(ended), at_least=1.0)]
    notes = [
        f"lost after steps {[line['failed_step'] for each in ended for line in each.recoveries]}, "
        f"went on from {[line['step'] for each in ended for line in each.recoveries]}",
        f"seconds from the failure until the workers were ready again: median "
        f"{statistics.median(each.seconds for each in ended):.1f}",
    ]
    write_report("kill -9 of a random worker at random moments of a run on Ray", comparisons, notes, options.output)


if __name__ == "__main__":
    main()
