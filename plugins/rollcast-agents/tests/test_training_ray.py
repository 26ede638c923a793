"""Agent loops on Ray: beside the ranks of a sharded actor, and in a pool of their own against replicas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_runs import AgentTask, launch, read_metrics, registered

from rollcast.contracts.runtime import runtimes
from rollcast_agents.records import load_trajectories, record_path

pytestmark = pytest.mark.long

ON_RAY = ("runtime=ray", "runtime.threads_per_worker=1", "trainer.test_freq=-1", "trainer.val_before_train=false")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentTask]:
    runtime: Any = runtimes.get("ray")
    here = runtime(num_cpus=4)
    here.nodes()
    with registered():
        yield AgentTask.make(tmp_path_factory.mktemp("agents"))
    here.shutdown()


def sampled(run_dir: Path, step: int) -> dict[str, list[list[int]]]:
    found = load_trajectories(record_path(run_dir, step))
    return {each.rollout_id: [segment.token_ids.tolist() for segment in each.segments] for each in found}


@pytest.mark.exhaustive
def test_ranks_of_a_sharded_actor_take_turns_of_their_own(task: AgentTask, tmp_path: Path) -> None:
    # Five prompts of one rollout on two ranks: one of them gets a filler, and they have different numbers of turns.
    sizes = ("data.train_batch_size=5", "rollout.n=1", "actor.ppo_mini_batch_size=5", "trainer.total_steps=1")
    estimator = "algorithm.adv_estimator=reinforce_plus_plus"
    one, two = tmp_path / "one", tmp_path / "two"
    launch(task.overrides(one, *sizes, estimator, "trainer.test_freq=-1", "trainer.val_before_train=false"))
    launch(task.overrides(two, *sizes, estimator, *ON_RAY, "placement.n_gpus_per_node=2"))
    assert sampled(one, 1) == sampled(two, 1)
    assert len(sampled(two, 1)) == 5
    left, right = (read_metrics(each)[-1] for each in (one, two))
    for name in ("agent/turns_mean", "agent/tool_calls_mean", "reward/mean"):
        assert left[name] == right[name]
    assert left["actor/grad_norm"] == pytest.approx(right["actor/grad_norm"], rel=1e-4)


@pytest.mark.exhaustive
def test_workers_in_a_pool_of_their_own_sample_from_replicas(task: AgentTask, tmp_path: Path) -> None:
    changes = (
        "rollout.weight_sync=shared_memory",
        "rollout.mode=standalone",
        "placement.pools={rollouts: [1], agents: {processes: [2], cpus_per_process: 0.5}, "
        "rewards: {processes: [2], cpus_per_process: 0.25, device: cpu}}",
        "placement.mapping={rollout: rollouts, agent_loop: agents, reward: rewards}",
        "trainer.total_steps=1",
    )
    launch(task.overrides(tmp_path / "run", *ON_RAY, *changes))
    metrics = read_metrics(tmp_path / "run")[-1]
    assert metrics["agent/rollouts"] == 16
    assert metrics["agent/failures"] == 0
    assert metrics["agent/tool_calls_mean"] > 0
    assert len(sampled(tmp_path / "run", 1)) == 16


@pytest.mark.parametrize(
    "runtime", [pytest.param((), id="local", marks=pytest.mark.exhaustive), pytest.param(ON_RAY, id="ray")]
)
def test_agents_roll_out_while_the_actor_trains(task: AgentTask, tmp_path: Path, runtime: tuple[str, ...]) -> None:
    changes = (
        "rollout.weight_sync=shared_memory",
        "rollout.mode=colocated",
        "trainer.max_staleness=1",
        "trainer.total_steps=3",
        "trainer.test_freq=-1",
    )
    launch(task.overrides(tmp_path / "run", *runtime, *changes))
    rows = [row for row in read_metrics(tmp_path / "run") if "reward/mean" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert 1 <= max(row["staleness/max"] for row in rows) <= 2
    assert sum(row["agent/failures"] for row in rows) == 0
    for step in (1, 2, 3):
        found = load_trajectories(record_path(tmp_path / "run", step))
        assert len({each.rollout_id for each in found}) == 16
        assert len({each.group_id for each in found}) == 4
    # Each rollout has a row in a group of its own prompt.
    assert all(row["reward/max"] >= row["reward/mean"] >= row["reward/min"] for row in rows)
