"""Runs whose users' code exits, hangs, floods or forks; they take every step.

Two of the eight runs belong to every suite; ``ROLLCAST_ALL_CASES=1`` adds the others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from agent_runs import AgentTask, launch, read_metrics, registered
from misbehaving import Letters, World

from rollcast.contracts.runtime import runtimes
from rollcast_agents.contracts.environment import environments
from rollcast_agents.contracts.tool import tools
from rollcast_testing.misbehaviour import CASES, RAISES

pytestmark = pytest.mark.long

GOOD = 8
RUNS = [(kind, runtime) for runtime in ("local", "ray") for kind in ("environment", "tool", "program", "reward")]
ALWAYS = {("reward", "local"), ("environment", "local")}
CHANGES = {
    "environment": ("agent.loop=environment", "agent.environment=misbehaving", "agent.environment_timeout_s=10"),
    "tool": ("agent.loop=tool", "agent.tools.letters={}", "agent.tool_timeout_s=10"),
    "program": ("agent.loop=program", "agent.program=misbehaving:talk", "agent.timeout_s=20"),
    "reward": (
        "agent.loop=single_turn",
        "reward.reward_manager=prime",
        "reward.on_error=zero",
        "reward.max_bad_share=1",
        "reward.timeout_s=2",
        "reward.reward_kwargs.path=misbehaving:score",
        "reward.reward_manager_kwargs={num_processes: 4, memory_limit_mb: 512}",
    ),
}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentTask]:
    with ExitStack() as stack:
        stack.enter_context(registered())
        stack.enter_context(tools.temporarily("letters", Letters))
        stack.enter_context(environments.temporarily("misbehaving", World))
        folder = tmp_path_factory.mktemp("agents")
        made = AgentTask.make(folder)
        cases = [*CASES, *["good"] * GOOD]
        rows = [{"prompt": f"{number}+1=", "ground_truth": case, "case": case} for number, case in enumerate(cases)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        yield made


@pytest.fixture
def on_ray() -> Iterator[None]:
    runtime: Any = runtimes.get("ray")
    here = runtime(num_cpus=4)
    here.nodes()
    yield
    here.shutdown()


@pytest.mark.parametrize(("kind", "runtime"), RUNS)
def test_a_run_takes_its_steps(
    task: AgentTask, tmp_path: Path, kind: str, runtime: str, request: pytest.FixtureRequest
) -> None:
    if (kind, runtime) not in ALWAYS and not os.environ.get("ROLLCAST_ALL_CASES"):
        pytest.skip("set ROLLCAST_ALL_CASES=1 for this run")
    if runtime == "ray":
        request.getfixturevalue("on_ray")
    changes = (
        f"runtime={runtime}",
        "runtime.threads_per_worker=1",
        "algorithm.adv_estimator=reinforce_plus_plus",
        "rollout.n=1",
        f"data.train_batch_size={len(CASES) + GOOD}",
        f"actor.ppo_mini_batch_size={len(CASES) + GOOD}",
        "agent.memory_limit_mb=512",
        "agent.batch_wait_s=0.5",
        "trainer.total_steps=2",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        *CHANGES[kind],
    )
    assert launch(task.overrides(tmp_path / "run", *changes)).step == 2
    steps = [row for row in read_metrics(tmp_path / "run") if row["step"] >= 1]
    for row in steps:
        if kind == "reward":
            assert row["reward/mean"] == pytest.approx(GOOD / (GOOD + len(CASES)))
            continue
        failures = {name: value for name, value in row.items() if name.startswith("agent/failures/")}
        assert set(failures) == {f"agent/failures/{kind}"}
        # A reply may call no tool, and a tool's exception is answered to the model.
        least = len(CASES) - len(RAISES) if kind == "tool" else len(CASES)
        assert failures[f"agent/failures/{kind}"] == least or (
            kind == "tool" and failures[f"agent/failures/{kind}"] > 5
        )
