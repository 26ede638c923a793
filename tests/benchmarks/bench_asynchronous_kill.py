"""`kill -9` of a process of a run that generates ahead: does it go on, and is every group of rollouts trained once?

    python tests/benchmarks/bench_asynchronous_kill.py [--kills 10] [--seed 0]

Each run of the calculator's agents on Ray, with `trainer.max_staleness=2`, loses one process at a random moment: the
driver, a replica, an actor's worker or an agents' worker, in turn. A run without its driver is started again by the same
command; the others go on by themselves. A run counts if it ends with exit code 0, every step is recorded once, and the
checkpoints tell that each step trained a whole batch of groups, none of them twice.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from _report import Comparison, write_report

STEPS, SIZE = 6, 8
#: Longest time of a run, in seconds.
_RUN_S = 900.0
#: Process to kill → part of its command line.
VICTIMS = {
    "driver": "",
    "replica": "rollcast_serving.process",
    "actor": "ray::actor_rollout",
    "agents": "ray::agent_loop",
}


@dataclass(frozen=True)
class Ended:
    """How a run with a kill has ended.

    Attributes:
        victim: process that was killed.
        after: steps that were recorded when it was killed.
        code: exit code of the last command.
        steps: recorded steps, in the order of the file.
        groups: by checkpoint, the number of groups that its state says were trained.
    """

    victim: str
    after: int
    code: int
    steps: list[int]
    groups: dict[int, int]

    @property
    def good(self) -> bool:
        """True if the run went on, and every group was trained once."""
        whole = all(count == step * SIZE for step, count in self.groups.items())
        return self.code == 0 and self.steps == list(range(1, STEPS + 1)) and whole and STEPS in self.groups


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start the command in a process of its own; what it says goes to a file beside its folder."""
    command = [
        *(sys.executable, "-m", "rollcast", "train", "recipe=calculator_tool", f"run_dir={folder}", "runtime=ray"),
        *("trainer.warm_start=null", "model.random_init=true", "runtime.threads_per_worker=1", "trackers=[jsonl]"),
        *("rollout.mode=standalone", "rollout.weight_sync=shared_memory", "trainer.max_staleness=2"),
        "placement.pools={rollouts: {processes: [1], cpus_per_process: 0.5}, agents: {processes: [1], cpus_per_process: 0.5}}",
        "placement.mapping={rollout: rollouts, agent_loop: agents}",
        *(f"data.train_batch_size={SIZE}", "actor.ppo_mini_batch_size=4", "rollout.n=4", "data.val_files=[]"),
        *(f"trainer.total_steps={STEPS}", "trainer.save_freq=1", "trainer.test_freq=-1", "trainer.export=false"),
    ]
    environment = {**os.environ, "RAY_ADDRESS": "", "OMP_NUM_THREADS": "1"}
    with folder.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)


def steps_of(folder: Path) -> list[int]:
    """Return the numbers of the recorded training steps."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [int(row["step"]) for row in rows if "reward/mean" in row]


def find(process: subprocess.Popen[bytes], victim: str) -> psutil.Process | None:
    """Return the process to kill; None while there is none."""
    if victim == "driver":
        return psutil.Process(process.pid)
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if VICTIMS[victim] in " ".join(child.cmdline()):
                return child
        except psutil.Error:  # it has just ended
            continue
    return None


def run(folder: Path, victim: str, after: int, wait_s: float) -> Ended:
    """Run to the end, killing one process ``wait_s`` seconds after a step was recorded.

    Raises:
        RuntimeError: the run ended, or hangs, before there was anything to kill.
    """
    process = start(folder)
    deadline = time.monotonic() + _RUN_S
    while len(steps_of(folder)) < after:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run ended (code {process.poll()}) or hangs; see {folder.with_suffix('.log')}")
        time.sleep(0.02)
    time.sleep(wait_s)
    found = None
    while found is None and process.poll() is None and time.monotonic() < deadline:
        found = find(process, victim)
        time.sleep(0.02)
    recorded = len(steps_of(folder))
    if found is not None:
        found.kill()
    code = process.wait(_RUN_S)
    if victim == "driver":
        code = start(folder).wait(_RUN_S)
    return Ended(victim, recorded, code, steps_of(folder), count_groups(folder))


def count_groups(folder: Path) -> dict[int, int]:
    """Return the number of trained groups by checkpoint, as the state of the rollout stage tells it."""
    found = {}
    for file in sorted((folder / "checkpoints").glob("step_*/trainer.json")):
        state: dict[str, Any] = json.loads(file.read_text())["stages"]["agent_rollout"]
        found[int(file.parent.name.removeprefix("step_"))] = state["first_batch"] * SIZE + len(set(state["trained"]))
    return found


def main() -> None:
    """Run all kills and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/asynchronous_kill.json"))
    options = parser.parse_args()
    generator = random.Random(options.seed)
    ended: list[Ended] = []
    with tempfile.TemporaryDirectory(prefix="rollcast_bench_") as folder:
        for number in range(options.kills):
            victim = list(VICTIMS)[number % len(VICTIMS)]
            place = Path(folder) / f"killed_{number}"
            ended.append(run(place, victim, generator.randrange(STEPS - 1), generator.random()))
            sys.stderr.write(f"{number + 1} of {options.kills}: {ended[-1]}\n")
            if not ended[-1].good:
                sys.stderr.write(place.with_suffix(".log").read_text(errors="replace")[-4000:] + "\n")
    good = sum(each.good for each in ended)
    comparison = Comparison("runs that went on with every group trained once / runs", good, len(ended), at_least=1.0)
    notes = [f"killed: {', '.join(f'{each.victim} after step {each.after}' for each in ended)}"]
    write_report("kill -9 of a process of a run that generates ahead", [comparison], notes, options.output)


if __name__ == "__main__":
    main()
