"""Held-out accuracy of the quick start by seed, each from the supervised warm-up of its own."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from _report import Comparison, write_report

SEEDS = range(20)
GOAL = 0.90
#: One thread, since the order of sums, and with it every sample after the first steps, depends on their number.
ONE_CORE = ["runtime=local", "runtime.threads_per_worker=1"]


@dataclass(frozen=True)
class Run:
    """A whole quick start.

    Attributes:
        warm_up_steps: supervised steps until the warm-up stopped.
        first, last: held-out accuracy after the warm-up and at the end.
        seconds: wall time of the whole command.
    """

    warm_up_steps: int
    first: float
    last: float
    seconds: float

    @classmethod
    def read(cls, folder: Path, seconds: float) -> Run:
        """Read a run directory."""
        accuracies = [row["val/accuracy"] for row in _rows(folder) if "val/accuracy" in row]
        warm_up_steps = int(_rows(folder / "warm_start")[-1]["step"])
        return cls(warm_up_steps, accuracies[0], accuracies[-1], seconds)


def train(folder: Path, seed: int, overrides: list[str]) -> Run:
    """Run the quick start with a seed."""
    command = [sys.executable, "-m", "rollcast", "train", "recipe=quickstart", f"trainer.seed={seed}"]
    start = time.perf_counter()
    done = subprocess.run([*command, f"run_dir={folder}", *overrides], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with code {done.returncode}:\n{done.stderr[-4000:]}")
    return Run.read(folder, time.perf_counter() - start)


def main() -> None:
    """Train every seed and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/quickstart_seeds.json"))
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--override", nargs="*", default=ONE_CORE, help="Hydra overrides of every run")
    parser.add_argument("--folder", type=Path, help="Keep the run directories here; finished ones are not repeated")
    options = parser.parse_args()
    runs: dict[int, Run] = {}
    with tempfile.TemporaryDirectory(prefix="rollcast_bench_") as scratch:
        for seed in options.seeds:
            runs[seed] = run = train((options.folder or Path(scratch)) / str(seed), seed, options.override)
            sys.stderr.write(f"seed {seed}: {run.first:.3f} -> {run.last:.3f} in {run.seconds:.0f} s\n")
    found = [run.last for run in runs.values()]
    notes = ["| seed | steps of the warm-up | after the warm-up | after GRPO |", "|---|---|---|---|"]
    notes += [f"| {seed} | {run.warm_up_steps} | {run.first:.3f} | {run.last:.3f} |" for seed, run in runs.items()]
    notes += [f"mean {statistics.mean(found):.3f}, lowest {min(found):.3f}, highest {max(found):.3f}"]
    reached = sum(accuracy >= GOAL for accuracy in found)
    name = f"seeds with an accuracy of {GOAL} / seeds"
    title = "the quick start by seed, accuracy on 500 held-out rows"
    write_report(title, [Comparison(name, reached, len(found), at_least=1.0)], notes, options.output)


def _rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    main()
