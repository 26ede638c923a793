"""Profilers and the step's metrics with workers in processes of their own."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from trainer_tools import SmallTask, launch, read_metrics

pytestmark = pytest.mark.long

TWO = ["runtime=ray", "runtime.threads_per_worker=1", "placement.n_gpus_per_node=2"]


@pytest.mark.exhaustive
def test_every_rank_of_the_chosen_role_has_its_trace(small_task: SmallTask, tmp_path: Path) -> None:
    profiler = ["profiler=torch", "profiler.steps=[1]", "profiler.all_ranks=true", "profiler.roles=[actor_rollout]"]
    few = ["trainer.total_steps=1", "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1"]
    launch(small_task.ppo(tmp_path / "run", *TWO, *profiler, *few))
    folder = tmp_path / "run" / "profiles"
    files = [folder / f"step_1-global_pool-rank_{rank}.pt.trace.json.gz" for rank in (0, 1)]
    assert sorted(folder.iterdir()) == files
    for rank, file in enumerate(files):
        with gzip.open(file, "rt") as opened:
            trace = json.load(opened)
        found = {event.get("name", "") for event in trace["traceEvents"]}
        assert {"actor_rollout.generate_sequences", "actor_rollout.update_actor"} <= found
        assert trace["distributedInfo"]["rank"] == rank
    row = read_metrics(tmp_path / "run")[-1]
    phases = {key.rpartition("/")[2] for key in row if key.startswith("perf/cpu_memory_used_gb/")}
    assert {"generate", "old_log_prob", "update_actor", "update_weights"} <= phases
    assert row["perf/tflops/actor"] > 0
    assert row["perf/throughput"] <= row["perf/total_num_tokens"] / row["time/step_s"] / 2 * 1.001
