"""``rollcast eval`` and ``rollcast generate`` with agent loops."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_runs import AgentTask, Dying, registered
from typer.testing import CliRunner

from rollcast.errors import ConfigError, PluginError
from rollcast_agents.commands import replay_app
from rollcast_agents.records import load_records, record_path
from rollcast_eval.commands import eval_app, generate_app
from rollcast_report.commands import runs_app

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentTask]:
    with registered():
        yield AgentTask.make(tmp_path_factory.mktemp("agents"))


def settings(task: AgentTask, *changes: str) -> list[str]:
    return [
        f"model.path={task.model}",
        "data.max_prompt_length=32",
        "data.max_response_length=160",
        "agent.max_response_length=6",
        "agent.max_assistant_turns=3",
        "agent.renderer=calling",
        "runtime=local",
        "rollout.n=2",
        "rollout.replica.env={OMP_NUM_THREADS: '1'}",
        *changes,
    ]


def run(app: Any, *arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def rows_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_agents_are_evaluated_and_an_interrupted_evaluation_goes_on(task: AgentTask, tmp_path: Path) -> None:
    prompts, output = str(task.folder / "test.jsonl"), tmp_path / "scored.jsonl"
    reward = ["reward=function", f"reward.reward_kwargs.path={task.folder / 'reward.py'}:said"]
    chosen = settings(task, *reward, "agent.loop=tool", "agent.tools.letters={}")
    text = run(eval_app, prompts, "--output", str(output), *chosen)
    assert "accuracy" in text
    assert "rollout/turns" in text
    rows = rows_in(output)
    assert [(row["index"], row["sample"]) for row in rows] == [(i, j) for i in range(3) for j in range(2)]
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        assert roles.count("tool") == row["metrics"].get("tool_calls", 0)
        assert roles.count("assistant") == row["metrics"]["turns"]
    assert any(row["metrics"]["turns"] > 1 for row in rows)
    assert len({json.dumps(row["messages"]) for row in rows}) > 3  # samples of a prompt differ
    metrics = json.loads(run(eval_app, prompts, "--output", str(output), *chosen, "--json"))
    assert metrics["rollout/turns"] == pytest.approx(sum(row["metrics"]["turns"] for row in rows) / 6)
    ends = {name: value for name, value in metrics.items() if name.startswith("rollout/end/")}
    assert sum(ends.values()) == pytest.approx(1)
    saved = output.with_name("scored.jsonl.run")
    before = list(load_records(record_path(saved, 0)))
    assert [record.trajectory.rollout_id for record in before] == [f"eval/{i}.{j}" for i in range(3) for j in range(2)]
    assert [(record.score, record.trajectory.messages) for record in before] == [
        (row["score"], row["messages"]) for row in rows
    ]
    # The last prompt is asked again, and a seed decides what its agents sample.
    output.write_text("".join(json.dumps(row) + "\n" for row in rows[:5]))
    with record_path(saved, 0).open("a") as file:
        file.write('{"version": 1, "group_')
    run(eval_app, prompts, "--output", str(output), *chosen)
    after = list(load_records(record_path(saved, 0)))
    assert [record.texts for record in after] == [record.texts for record in before]
    figures = json.loads(run(replay_app, str(saved), "--json"))  # by the reward of the evaluation
    assert (figures["rollouts"], figures["changed"]) == (6, 0)
    assert figures["score"] == pytest.approx(sum(row["score"] for row in rows) / 6)
    page = Path(run(runs_app, "report", str(saved)).strip())
    (packed,) = re.findall(r'id="explorer-index"[^>]*>([\w+/=]+)<', page.read_text())
    assert json.loads(zlib.decompress(base64.b64decode(packed)))["count"] == 6
    untimed = [[{**row, "metrics": None} for row in each] for each in (rows, rows_in(output))]
    assert untimed[0] == untimed[1]
    with pytest.raises(ConfigError, match="other settings"):
        run(eval_app, prompts, "--output", str(output), *chosen, "agent.max_assistant_turns=1")


@pytest.mark.exhaustive
def test_environments_score_and_failures_are_counted(task: AgentTask, tmp_path: Path) -> None:
    Dying.count, output = 0, tmp_path / "scored.jsonl"
    chosen = settings(task, "reward=exact_match", "agent.loop=environment", "agent.environment=dying")
    metrics = json.loads(run(eval_app, str(task.folder / "test.jsonl"), "--output", str(output), *chosen, "--json"))
    rows = rows_in(output)
    failed = [row for row in rows if "failure" in row]
    assert 0 < len(failed) < len(rows)
    assert metrics["rollout/failures/environment"] == pytest.approx(len(failed) / len(rows))
    for row in failed:
        assert (row["score"], row["correct"], row["failure"]["boundary"]) == (0.0, False, "environment")
        assert row["messages"][1]["content"] == "vowels!"


def test_generate_writes_conversations(task: AgentTask, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    chosen = settings(task, "agent.loop=single_turn", "rollout.n=1", "agent.save_trajectories=-1")
    run(generate_app, str(task.folder / "test.jsonl"), str(output), *chosen)
    assert [[message["role"] for message in row["messages"]] for row in rows_in(output)] == [["user", "assistant"]] * 3
    assert not list(tmp_path.glob("*.run"))


def test_a_loop_that_is_not_there_is_named(task: AgentTask, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"agent\.loop"):
        run(generate_app, str(task.folder / "test.jsonl"), str(tmp_path / "x"), *settings(task, "agent.loop=nothing"))
