"""The quick start, shortened, killed at random moments and resumed: does it end where the undisturbed run ends?

A run is everything that `rollcast train` does: the task's files, the supervised warm-up, and steps with
validations and checkpoints. Each one is killed once (`kill -9`, so nothing of it can clean up), started again with the
same command, and compared with the undisturbed run: metrics without wall times, validation samples, the last
checkpoint and the exported weights. Most moments are spread over the whole run, one in each of equal parts of it;
some are inside the writing of a checkpoint, which would otherwise hardly be met; some runs are on Ray, where all of
Ray's processes have to be gone in the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from _report import Comparison, write_report
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

STEPS, SAVE_FREQ = 12, 2
#: How long a run may take, and how long Ray's processes may outlive a killed one, in seconds.
_RUN_S, _GONE_S = 600.0, 90.0
#: Files of a checkpoint of one process.
_FILES = 5


@dataclass(frozen=True)
class Kill:
    """When a run is killed.

    Attributes:
        runtime: ``local`` or ``ray``.
        moment: as a share of the undisturbed run's time.
        checkpoint: instead of at a moment, while this step's checkpoint is being written.
        files: as soon as it has so many files.
    """

    runtime: str
    moment: float = 0.0
    checkpoint: int | None = None
    files: int = 0


def draw_kills(local: int, writing: int, ray: int, seed: int) -> list[Kill]:
    """Random moments, one in each of equal parts of a run; and random checkpoints."""
    generator = random.Random(seed)
    kills = [Kill("local", (part + generator.random()) / local) for part in range(local)]
    steps = range(SAVE_FREQ, STEPS + 1, SAVE_FREQ)
    kills += [
        Kill("local", checkpoint=generator.choice(steps), files=generator.randrange(_FILES)) for _ in range(writing)
    ]
    return kills + [Kill("ray", (part + generator.random()) / ray) for part in range(ray)]


def start(folder: Path, runtime: str) -> subprocess.Popen[bytes]:
    """The command, in a process of its own; what it says goes to a file beside its folder."""
    command = [
        *(sys.executable, "-m", "rollcast", "train", "recipe=quickstart", f"run_dir={folder}", f"runtime={runtime}"),
        *(f"trainer.total_steps={STEPS}", f"trainer.save_freq={SAVE_FREQ}", "trainer.test_freq=4"),
        *("data.val_max_samples=100", "trackers=[jsonl]"),
    ]
    with folder.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "RAY_ADDRESS": ""}
        )


def run(folder: Path, runtime: str) -> float:
    """To its end; seconds.

    Raises:
        RuntimeError: it ended with an error; says what it said last.
    """
    begun = time.perf_counter()
    code = start(folder, runtime).wait(_RUN_S)
    if code:
        tail = "\n".join(folder.with_suffix(".log").read_text(errors="replace").splitlines()[-20:])
        raise RuntimeError(f"{folder.name} ended with code {code}:\n{tail}")
    return time.perf_counter() - begun


def run_killed(folder: Path, kill: Kill, seconds: float) -> tuple[str, list[psutil.Process]] | None:
    """Kill it at its moment; where it was, and its processes that were left. None if it ended before."""
    process = start(folder, kill.runtime)
    end = time.perf_counter() + kill.moment * seconds
    while process.poll() is None and not (
        time.perf_counter() >= end if kill.checkpoint is None else has_written(folder / "checkpoints", kill)
    ):
        time.sleep(0.001)
    if process.poll() is not None:
        return None
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    return describe(folder), children


def has_written(checkpoints: Path, kill: Kill) -> bool:
    """Whether the checkpoint has its files, or is complete already."""
    unfinished = checkpoints / f".unfinished-step_{kill.checkpoint}"
    if not unfinished.exists():
        return (checkpoints / f"step_{kill.checkpoint}").exists()
    return count_files(unfinished) >= kill.files


def count_files(folder: Path) -> int:
    """Files below a folder, which may vanish meanwhile."""
    return sum(len(names) for _, _, names in os.walk(folder))


def describe(folder: Path) -> str:
    """Where a killed run was."""
    checkpoints = folder / "checkpoints"
    unfinished = sorted(checkpoints.glob(".unfinished-*"))
    steps = len(read_rows(folder / "metrics.jsonl"))
    if unfinished:
        name = unfinished[0].name.removeprefix(".unfinished-")
        return f"writing checkpoint {name}, of which it had {count_files(unfinished[0])} files"
    if steps > STEPS:
        return "after its last step"
    if steps:
        return f"in step {steps}"
    if (folder / "warm_start" / "export").exists():
        return "before its first validation"
    return "in the warm-up" if (folder / "warm_start" / "metrics.jsonl").exists() else "starting"


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON objects."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics less wall times and rates."""
    timed = ("_per_s", "/seconds")
    return [
        {key: value for key, value in row.items() if not (key.startswith(("time/", "perf/")) or key.endswith(timed))}
        for row in rows
    ]


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """Everything that a checkpoint holds: of the trainer, and of each model with its optimizer and random states."""
    found: dict[str, Any] = {"trainer": json.loads((folder / "trainer.json").read_text())}
    for summary in folder.rglob("engine.json"):
        home = summary.parent
        with tempfile.TemporaryDirectory() as scratch:
            whole = Path(scratch) / "whole.pt"
            dcp_to_torch_save(home / "shards", whole)
            tensors = torch.load(whole, weights_only=False)
        found[str(home.relative_to(folder))] = {
            "summary": json.loads(summary.read_text()),
            "tensors": tensors,
            "random": [torch.load(file, weights_only=False) for file in sorted((home / "rng").iterdir())],
        }
    return found


def find_difference(left: Any, right: Any, where: str) -> str | None:
    """The first value that is not the same, bit for bit; None if there is none."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return None if left.dtype == right.dtype and torch.equal(left, right) else where
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        pairs = [(left[key], right[key], f"{where}/{key}") for key in left]
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple) and len(left) == len(right):
        pairs = [(one, other, f"{where}[{index}]") for index, (one, other) in enumerate(zip(left, right, strict=True))]
    else:
        return None if bool(left == right) else f"{where}: {left!r:.60} and {right!r:.60}"
    return next((found for pair in pairs if (found := find_difference(*pair)) is not None), None)


def compare(folder: Path, whole: Path) -> str | None:
    """The first difference between two runs that have ended; None if there is none."""
    parts: dict[str, Callable[[Path], Any]] = {
        "metrics": lambda run_dir: without_times(read_rows(run_dir / "metrics.jsonl")),
        "warm-up": lambda run_dir: without_times(read_rows(run_dir / "warm_start" / "metrics.jsonl")),
        "samples": lambda run_dir: read_rows(run_dir / "samples.jsonl"),
        "checkpoint": lambda run_dir: read_checkpoint(run_dir / "checkpoints" / f"step_{STEPS}"),
        "weights": lambda run_dir: load_file(run_dir / "export" / "model.safetensors"),
    }
    for name, read in parts.items():
        if (found := find_difference(read(folder), read(whole), name)) is not None:
            return found
    return None


def kill_and_resume(folder: Path, kill: Kill, whole: Path, seconds: float) -> tuple[str, str | None]:
    """Where it was killed, and the first difference in the end."""
    begun = time.perf_counter()
    while (killed := run_killed(folder, kill, seconds)) is None:
        shutil.rmtree(folder)
        seconds, begun = time.perf_counter() - begun, time.perf_counter()
    place, left = killed
    _, alive = psutil.wait_procs(left, timeout=_GONE_S)
    if alive:
        return place, f"left running: {', '.join(process.name() for process in alive)}"
    try:
        run(folder, kill.runtime)
    except RuntimeError as error:
        return place, str(error)
    return place, compare(folder, whole)


def main() -> None:
    """Run, kill, resume, compare and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local", type=int, default=12, help="kills at moments spread over a run without Ray")
    parser.add_argument("--writing", type=int, default=4, help="kills while a checkpoint is written")
    parser.add_argument("--ray", type=int, default=4, help="kills at moments spread over a run on Ray")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/resume.json"))
    options = parser.parse_args()
    kills = draw_kills(options.local, options.writing, options.ray, options.seed)
    same, notes = 0, []
    with tempfile.TemporaryDirectory() as scratch:
        whole = {name: Path(scratch) / f"whole-{name}" for name in dict.fromkeys(kill.runtime for kill in kills)}
        seconds = {name: run(folder, name) for name, folder in whole.items()}
        for number, kill in enumerate(kills):
            folder = Path(scratch) / f"killed-{number}"
            place, difference = kill_and_resume(folder, kill, whole[kill.runtime], seconds[kill.runtime])
            same += difference is None
            notes.append(f"{number + 1}. {kill.runtime}, killed {place}: {difference or 'equal'}")
            sys.stderr.write(notes[-1] + "\n")
    comparison = Comparison("runs that end as the undisturbed one, of those killed", same, len(kills), at_least=1.0)
    write_report(f"resume: {STEPS} steps of the quick start", [comparison], notes, options.output)
    if not comparison.holds:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
