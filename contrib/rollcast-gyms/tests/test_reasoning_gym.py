"""The environment and the recipe ``reasoning_gym``, and the preprocessor ``episodes``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from typer.testing import CliRunner

from rollcast import compose
from rollcast.contracts.trainer import trainers
from rollcast_agents.commands import validate_app
from rollcast_agents.contracts.renderer import Message
from rollcast_agents.records import load_records, record_path
from rollcast_agents.testing import EnvironmentSuite
from rollcast_data.files import read_rows
from rollcast_data.testing import PreprocessorSuite
from rollcast_gyms.episodes import SPLITS, Episodes
from rollcast_gyms.reasoning_gym import ReasoningGym
from rollcast_testing import RecipeSuite
from rollcast_testing.tiny import CHAT_TEMPLATE, tiny_model_folder

SMALL = [
    "data.train_batch_size=2",
    "data.val_max_samples=2",
    "rollout.n=2",
    "actor.ppo_mini_batch_size=2",
    "actor.entropy_coeff=0.01",
    "actor.engine.param_dtype=null",
    "agent.max_response_length=8",
    "trainer.total_steps=2",
    "trainer.test_freq=2",
    "runtime=local",
    "runtime.threads_per_worker=1",
    "trackers=[jsonl]",
]


class TestRecipe(RecipeSuite):
    name = "reasoning_gym"
    overrides: ClassVar[Sequence[str]] = ("model.path=model",)


class TestEpisodes(PreprocessorSuite):
    name = "episodes"
    columns: ClassVar[Mapping[str, Sequence[str]]] = {"*": ("prompt", "index")}


class TestReasoningGym(EnvironmentSuite):
    name = "reasoning_gym"
    options: ClassVar = {"task": "basic_arithmetic", "size": 10}
    tasks: ClassVar = [{"prompt": [], "index": 3}]

    @pytest.fixture(autouse=True)
    def package(self):
        pytest.importorskip("reasoning_gym")


def test_the_right_answer_scores_one():
    pytest.importorskip("reasoning_gym")

    async def run(answer):
        world = ReasoningGym("basic_arithmetic", size=10)
        await world.reset({"index": 3})
        return (await world.step(Message(answer or f"<answer>{world._entry['answer']}</answer>"))).reward

    assert asyncio.run(run("")) == 1.0
    assert asyncio.run(run("no idea")) < 1.0


def test_generated_tasks_are_validated(tmp_path):
    pytest.importorskip("reasoning_gym")
    path = tmp_path / "rows.jsonl"
    tasks = ("basic_arithmetic", "leg_counting", "boxnet")
    path.write_text("".join(f'{{"prompt": "Answer.", "index": 1, "task": "{task}"}}\n' for task in tasks))
    result = CliRunner().invoke(validate_app, [str(path), "agent.environment=reasoning_gym"], catch_exceptions=False)
    assert "3 rows checked with environment reasoning_gym, 0 faults" in result.stdout
    assert "no correct reply is known for 1 of them" in result.stdout


def test_episodes_are_numbered_and_no_number_is_in_both_files(tmp_path: Path) -> None:
    Episodes().run(None, tmp_path)
    numbers = [{row.values["index"] for row in read_rows(tmp_path / f"{split}.jsonl")} for split in SPLITS]
    assert [len(each) for each in numbers] == list(SPLITS.values())
    assert not numbers[0] & numbers[1]


def test_reasoning_gym_runs_two_steps(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    model = tiny_model_folder(tmp_path / "tiny", hidden=32, chat_template=CHAT_TEMPLATE)
    # A character is a token, so prompts are longer than those of a real model.
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(content | {"max_position_embeddings": 8192}))
    sizes = ["data.max_prompt_length=400", "data.max_response_length=64", f"run_dir={tmp_path / 'run'}"]
    config = compose(["recipe=reasoning_gym", f"model.path={model}", *SMALL, *sizes]).config
    trainers.get(config.trainer.name).launch(config)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    records = list(load_records(record_path(tmp_path / "run", 1)))
    asked = {record.trajectory.group_id: record.trajectory.messages[1]["content"] for record in records}
    assert len(set(asked.values())) == 2
    assert all(record.trajectory.turn_rewards for record in records)
