"""The trainer runs agent loops: rows, rewards, failures and resume, end to end on a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_runs import AgentTask, launch, read_metrics, registered

from rollcast_agents.records import load_records, record_path


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentTask]:
    with registered():
        yield AgentTask.make(tmp_path_factory.mktemp("agents"))


def test_a_tool_loop_is_trained(task: AgentTask, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert launch(task.overrides(run_dir)).step == 2
    steps = [row for row in read_metrics(run_dir) if row["step"] >= 1]
    assert [row["agent/rollouts"] for row in steps] == [16, 16]
    # The actor computes what the rollout recorded, so every trained token was sampled in its context.
    assert all(row["rollout/logprob_gap_max"] < 1e-5 for row in steps)
    assert all(row["agent/turns_mean"] > row["agent/tool_calls_mean"] > 0 for row in steps)
    records = list(load_records(record_path(run_dir, 1)))
    assert len({each.trajectory.rollout_id for each in records}) == 16
    assert all(each.score is not None and each.task["ground_truth"] for each in records)
    assert all(len(each.texts) == len(each.trajectory.segments) for each in records)
    assert all("[user]" in each.texts[0] for each in records)
    called = [each for each in records if each.trajectory.metrics.get("tool_calls")]
    # The reward sees the results of tools in the messages.
    assert called
    assert all(each.score >= 0.75 for each in called)
    assert all(each.score < 0.75 for each in records if not each.trajectory.metrics.get("tool_calls"))
