"""Predicted against measured step time and memory of sixteen configurations that run on two cores.

The configurations are two tasks (the quick start, and GSM8K with a tiny model), two engines (FSDP and Megatron), and four
placements (the rollout with the actor on one process and on two, and in a process of its own with staleness 0 and 1). Six of
them, marked by a star, calibrate the cost model ``measured``: each is measured by ``rollcast profile`` and by a run. The other
ten are predicted. All of it takes a quarter of an hour, and a machine that does nothing else.

Run it with the folder of GSM8K in ``ROLLCAST_GSM8K_DIR``::

    python tests/benchmarks/bench_predictions.py runs/predictions

Folders that are there already are not made again.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rollcast_automap.measured.check import RunCheck, check_run
from rollcast_automap.measured.measured_run import read_run
from rollcast_automap.profiling.measured_costs import MeasuredConfig, MeasuredCosts
from rollcast_testing.tiny import CHAT_TEMPLATE, tiny_model_folder

ENGINES = {
    "fsdp": ["engine=fsdp", "actor.engine.param_dtype=fp32"],
    "megatron": ["engine=megatron", "actor.engine.dtype=float32"],
}
RECIPES = {"fsdp": "gsm8k_grpo", "megatron": "gsm8k_megatron"}
PLACEMENTS = {
    "one": ["placement.n_gpus_per_node=1"],
    "two": ["placement.n_gpus_per_node=2"],
    "split": [
        *("placement.n_gpus_per_node=1", "placement.pools.rollout=[1]", "placement.mapping.rollout=rollout"),
        *("rollout.mode=standalone", "rollout.weight_sync=shared_memory"),
    ],
}
PLACEMENTS["ahead"] = [*PLACEMENTS["split"], "trainer.max_staleness=1"]
#: Each task with each engine, and each engine and the rollout on one process and on two.
CALIBRATES = (
    *("sort-fsdp-one", "sort-fsdp-two", "sort-megatron-split"),
    *("gsm8k-megatron-one", "gsm8k-megatron-two", "gsm8k-fsdp-split"),
)
STEPS = 20
#: Task → sizes that are measured: those of its passes, and smaller ones.
SIZES = {
    "sort": ("--batch-sizes=16,128,512", "--lengths=9,18", "--new-tokens=8", "--response-share=0.5"),
    "gsm8k": ("--batch-sizes=2,8,64", "--lengths=64,256,384", "--new-tokens=16", "--response-share=0.13"),
}


@dataclass(frozen=True)
class Case:
    """One configuration: its name and its overrides."""

    name: str
    overrides: list[str]


def find_cases(folder: Path) -> list[Case]:
    """Return the sixteen configurations, their data and model in ``folder``."""
    common = [
        *("trainer.test_freq=-1", "trainer.save_freq=-1", f"trainer.total_steps={STEPS}"),
        *("trainer.val_before_train=false", "trackers=[jsonl]", "runtime.threads_per_worker=1"),
    ]
    model = folder / "model"
    data = folder / "gsm8k"
    tasks = {
        "sort": [
            *("trainer.warm_start=null", "trainer.export=false"),
            f"model.path={folder}/warm_up/warm_start/export",
        ],
        "gsm8k": [
            f"model.path={model}",
            *(f"data.train_files=[{data}/train.parquet]", f"data.val_files=[{data}/test.parquet]"),
            *("data.train_batch_size=16", "data.max_prompt_length=384", "data.max_response_length=64", "rollout.n=4"),
            *("actor.ppo_mini_batch_size=8", "actor.use_dynamic_bsz=false", "actor.ppo_micro_batch_size_per_gpu=8"),
            "actor.log_prob_micro_batch_size_per_gpu=16",
            # A random model solves nothing; a little entropy bonus gives it a gradient all the same.
            "actor.entropy_coeff=0.01",
        ],
    }
    recipes = {"sort": dict.fromkeys(ENGINES, "quickstart"), "gsm8k": RECIPES}
    return [
        Case(
            f"{task}-{engine}-{place}",
            [f"recipe={recipes[task][engine]}", *tasks[task], *ENGINES[engine], *PLACEMENTS[place], *common],
        )
        for task, engine, place in itertools.product(tasks, ENGINES, PLACEMENTS)
    ]


def rollcast(*arguments: str) -> str:
    """Run the command and return what it prints."""
    command = [sys.executable, "-m", "rollcast", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise SystemExit(f"rollcast {' '.join(arguments)} failed")
    return done.stdout


def measure(folder: Path, case: Case) -> Path:
    """Return the run of a configuration, and make it if it is not there."""
    run = folder / "runs" / case.name
    if not (run / "timeline.jsonl").is_file():
        rollcast("train", *case.overrides, f"run_dir={run}")
    return run


def profile(folder: Path, case: Case) -> Path:
    """Return the cost table of a configuration, and make it if it is not there."""
    table = folder / "profiles" / case.name / "costs.json"
    if not table.is_file():
        rollcast("profile", *case.overrides, *SIZES[case.name.split("-")[0]], f"--output={table}")
    return table


def prepare(folder: Path) -> None:
    """Make the model and the data of the GSM8K configurations."""
    if not (folder / "model").is_dir():
        tiny_model_folder(folder / "model", hidden=64, layers=2, chat_template=CHAT_TEMPLATE)
    if not (folder / "warm_up").is_dir():
        rollcast("train", "recipe=quickstart", "trainer.total_steps=1", f"run_dir={folder / 'warm_up'}")
    if not (folder / "gsm8k").is_dir():
        rollcast("preprocess", "gsm8k", f"--input={os.environ['ROLLCAST_GSM8K_DIR']}", f"--output={folder / 'gsm8k'}")


def check(folder: Path, cases: list[Case]) -> dict[str, RunCheck]:
    """Return the predicted and measured figures of every configuration, and print them."""
    tables = [str(folder / "profiles" / name / "costs.json") for name in CALIBRATES]
    runs = [str(folder / "runs" / name) for name in CALIBRATES]
    costs = MeasuredCosts(MeasuredConfig(tables=tables, runs=runs))
    found = {case.name: check_run(read_run(folder / "runs" / case.name), costs) for case in cases}
    row = "{:22} {:>9} {:>9} {:>7} {:>9} {:>9} {:>7}"
    say(row.format("", "step (s)", "measured", "off by", "MB", "measured", "off by"))
    for name, each in found.items():
        figures = (each.step.predicted, each.step.measured, each.memory.predicted / 1e6, each.memory.measured / 1e6)
        seconds, megabytes = (f"{value:.3f}" for value in figures[:2]), (f"{value:.0f}" for value in figures[2:])
        errors = (f"{each.step.error:+.1%}", f"{each.memory.error:+.1%}")
        say(row.format(name + " *" * (name in CALIBRATES), *seconds, errors[0], *megabytes, errors[1]))
    return found


def summarize(found: dict[str, RunCheck]) -> None:
    """Print the errors of the configurations that calibrated nothing, and the pairs in the wrong order."""
    held = {name: each for name, each in found.items() if name not in CALIBRATES}
    for what in ("step", "memory"):
        errors = [abs(getattr(each, what).error) for each in held.values()]
        say(f"{what}: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}, {len(held)} held out")
    wrong = [
        f"{one}, {other}"
        for one, other in itertools.combinations(held, 2)
        if abs(held[one].step.measured / held[other].step.measured - 1) > 0.15
        and (held[one].step.measured > held[other].step.measured)
        != (held[one].step.predicted > held[other].step.predicted)
    ]
    say(f"pairs that differ by more than 15 % in the wrong order: {'; '.join(wrong) or 'none'}")


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    place = parser.parse_args().folder.resolve()
    place.mkdir(parents=True, exist_ok=True)
    prepare(place)
    configurations = find_cases(place)
    for each in configurations:
        measure(place, each)
        if each.name in CALIBRATES:
            profile(place, each)
        say(each.name)
    summarize(check(place, configurations))
