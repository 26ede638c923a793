"""Step time with the critic's update beside the actor's, over the step time with one after the other.

One run of ``recipe=quickstart_ppo`` with the critic in a pool of its own takes both kinds of step in turn: in every other
step, the critic's update is joined as soon as it has started. Both compute the same.

    python tests/benchmarks/bench_overlap.py --steps 24
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from unittest import mock

from _report import Comparison, write_report

from rollcast.config import compose
from rollcast_trainer.ppo import PpoTrainer
from rollcast_trainer.run.run import Run
from rollcast_trainer.run.settings import check_run
from rollcast_trainer.workers.role_group import Update

#: Steps at the start that are not counted: the first calls of each process take longer.
WARM_UP = 4
FOLLOW = Run.follow
#: Metric → the goal of its ratio. Two busy cores share their memory, so each update alone takes a little longer.
METRICS = {"time/step_s": 0.75, "time/update_critic_s": 0.25, "time/update_actor_s": 1.25}


def follow_in_turn(run: Run, phase: str, update: Update) -> None:
    """Follow an update as a run does, and join it at once in odd steps."""
    FOLLOW(run, phase, update)
    if run.step % 2:
        run.join_updates()


def measure(folder: Path, steps: int, changes: list[str]) -> list[dict[str, float]]:
    """Return the metrics of each step."""
    overrides = [
        *("recipe=quickstart_ppo", f"run_dir={folder}", f"trainer.total_steps={steps}", "trackers=[jsonl]"),
        *("trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.val_before_train=false", "trainer.export=false"),
        *("placement.n_gpus_per_node=1", "placement.pools={critics: [1]}", "placement.mapping={critic: critics}"),
        # Without a warm-up, rewards are rarely unequal in a group; every row has a gradient all the same.
        *("trainer.warm_start=null", "model.random_init=true", "actor.skip_zero_advantage=false"),
        *("runtime.threads_per_worker=1", *changes),
    ]
    run = Run(check_run(compose(overrides).config, PpoTrainer))
    trainer = PpoTrainer(run)
    with run, mock.patch.object(Run, "follow", follow_in_turn):
        trainer.fit()
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "time/step_s" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24, help="steps of the run")
    parser.add_argument("--output", type=Path, default=Path("runs/bench_overlap.json"), help="file of the figures")
    parser.add_argument("changes", nargs="*", help="overrides of the recipe")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = measure(Path(folder), arguments.steps, arguments.changes)
    counted = [line for line in lines if line["step"] > WARM_UP]
    serial, beside = (
        {name: statistics.median(line[name] for line in counted if line["step"] % 2 == odd) for name in METRICS}
        for odd in (1, 0)
    )
    comparisons = [
        Comparison(f"{name}, beside over in turn", beside[name], serial[name], at_most=goal)
        for name, goal in METRICS.items()
    ]
    write_report("Updates of two pools", comparisons, [f"medians of {len(counted) // 2} steps each"], arguments.output)


if __name__ == "__main__":
    main()
