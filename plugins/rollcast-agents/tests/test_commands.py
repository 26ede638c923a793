"""``rollcast validate-task`` and ``rollcast replay-trajectories``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from rollcast.contracts.reward import RewardSample, rewards
from rollcast.errors import DataError
from rollcast_agents.commands import replay_app, validate_app
from rollcast_agents.contracts.environment import BaseEnvironment, Observation, environments
from rollcast_agents.contracts.trajectory import Segment, Trajectory, VersionRun
from rollcast_agents.records import Record, load_records, record_path, save_records
from rollcast_testing.tiny import tiny_model_folder


def run(app, *arguments: object):
    return CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{a}+1=", "ground_truth": str(a + 1)} for a in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Sums(BaseEnvironment):
    """Asks for the row's answer."""

    count = 0

    def __init__(self, drifts: bool = False, lenient: bool = False, knows: str | None = None) -> None:
        self.drifts, self.lenient, self.knows = drifts, lenient, knows

    async def reset(self, task):
        type(self).count += 1
        self.answer = task["ground_truth"]
        return Observation([{"role": "user", "content": f"say it, {self.count if self.drifts else ''}"}])

    async def step(self, message):
        return Observation(reward=float(self.lenient or message.text == self.answer), done=True)

    async def solution(self):
        return None if self.knows is None else [self.knows.replace("?", str(self.answer))]


def test_a_sound_reward_passes(prompts: Path) -> None:
    result = run(validate_app, prompts, "reward=exact_match")
    assert (result.exit_code, result.stdout) == (0, "3 rows checked with reward exact_match, 0 faults\n")


def test_a_wrong_answer_and_a_lenient_reward_are_named(prompts: Path) -> None:
    result = run(validate_app, prompts, "reward=exact_match", "--answer", "{ground_truth}!", "--rows", 2)
    assert result.exit_code == 1
    assert "row 1: the reply '1!' is wrong, with score 0; the answer is '1'" in result.stdout
    assert "2 rows checked with reward exact_match, 2 faults" in result.stdout

    async def always(sample: RewardSample) -> float:
        return 1.0

    def broken(sample: RewardSample) -> float:
        return 1.0 / len(sample.response)

    with rewards.temporarily("always", always), rewards.temporarily("broken", broken):
        assert "row 3: the reply '' is correct" in run(validate_app, prompts, "reward.name=always").stdout
        assert (
            "row 1: the reward raised ZeroDivisionError at ''"
            in run(validate_app, prompts, "reward.name=broken").stdout
        )


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ("{}", ""),
        ("{drifts: true}", "two episodes of the same task begin differently"),
        ("{lenient: true}", "an empty reply has the reward 1"),
        ("{knows: '?'}", ""),
        ("{knows: no}", "the reply 'no' has the reward 0, not 1"),
    ],
)
def test_environments(prompts: Path, options: str, fault: str) -> None:
    with environments.temporarily("sums", Sums):
        result = run(validate_app, prompts, "agent.environment=sums", f"agent.environment_kwargs={options}")
    assert (fault in result.stdout, result.exit_code) == (True, int(bool(fault)))


def test_rows_of_an_environment_need_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "Play."}\n')
    with environments.temporarily("sums", Sums):
        result = run(validate_app, path, "agent.environment=sums", "data.ground_truth_key=null")
        assert "1 rows checked with environment sums, 0 faults" in result.stdout
        assert "no correct reply is known for 1 of them" in result.stdout
        wrong = run(validate_app, path, "agent.environment=sums", "--answer", "5")
    assert (wrong.exit_code, "the reply '5' has the reward 0" in wrong.stdout) == (1, True)
    with pytest.raises(DataError, match="ground_truth"):
        run(validate_app, path, "reward=exact_match")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for app in (validate_app, replay_app):
        with pytest.raises(DataError, match="nothing"):
            run(app, tmp_path / "nothing", "model.path=x")


def test_trajectories_are_scored_again(tmp_path: Path) -> None:
    model = tiny_model_folder(tmp_path / "model")

    def made(number: int, environment_reward: float | None = None) -> Trajectory:
        ids = np.array([4, 5], np.int32)
        segments = (
            Segment(ids, sampled=False, turn=0),
            Segment(ids, True, 0, np.zeros(2, np.float32), [VersionRun(0, 2)]),
        )
        messages = [{"role": "assistant", "content": f"answer {number}"}]
        return Trajectory(segments, "g", f"r{number}", "done", reward=environment_reward, messages=messages)

    def says(sample: RewardSample) -> float:
        return float(sample.extra_info["messages"][-1]["content"] == f"answer {sample.ground_truth}")

    records = [
        Record(made(0), {"ground_truth": 0}, 1.0),
        Record(made(1), {"ground_truth": 2}, 1.0),
        Record(made(2, 0.25), {"ground_truth": 2}, 0.25),
    ]
    save_records(record_path(tmp_path, 1), records)
    output = tmp_path / "again.jsonl"
    with rewards.temporarily("says", says):
        options = (f"model.path={model}", "reward.name=says", "--json", "--output", output)
        result = run(replay_app, tmp_path, *options)
    figures = json.loads(result.stdout)
    assert figures["rollouts"] == 3
    assert figures["changed"] == 1
    assert figures["score"] == pytest.approx(1.25 / 3)
    assert figures["score_before"] == pytest.approx(2.25 / 3)
    assert [record.score for record in load_records(output)] == [1.0, 0.0, 0.25]
