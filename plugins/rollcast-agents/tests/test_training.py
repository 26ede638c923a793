"""The trainer runs agent loops: rows, rewards, failures and resume, end to end on a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from agent_plugins import Killing
from agent_runs import AgentTask, Dying, launch, read_metrics, registered, set_up

from rollcast.errors import ConfigError, RolloutError
from rollcast_agents.contracts.agent_loop import BaseAgentLoop, Outcome, agent_loops
from rollcast_agents.contracts.environment import environments
from rollcast_agents.records import load_records, load_trajectories, record_path


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
    assert all(
        each.texts[0].startswith("[user]") and len(each.texts) == len(each.trajectory.segments) for each in records
    )
    called = [each for each in records if each.trajectory.metrics.get("tool_calls")]
    # The reward sees the results of tools in the messages.
    assert called
    assert all(each.score >= 0.75 for each in called)
    assert all(each.score < 0.75 for each in records if not each.trajectory.metrics.get("tool_calls"))


@pytest.mark.exhaustive
def test_training_on_recorded_agents_repeats_bit_by_bit(task: AgentTask, tmp_path: Path) -> None:
    recorded, replayed = tmp_path / "recorded", tmp_path / "replayed"
    launch(task.overrides(recorded, "runtime.record_trajectories=true"))
    with set_up(task.overrides(replayed, f"trainer.replay={recorded}")) as trainer:
        assert set(trainer.run.groups) == {"actor_rollout"}  # no worker runs loops
    launch(task.overrides(replayed, f"trainer.replay={recorded}"))

    def training(run_dir: Path) -> list[dict[str, float]]:
        left_out = ("val/", "time/", "perf/", "sync/", "rollout/weight_version")
        return [
            {key: value for key, value in row.items() if not key.startswith(left_out) and not key.endswith("_per_s")}
            for row in read_metrics(run_dir)
            if row["step"]
        ]

    assert training(replayed) == training(recorded)
    assert all("agent/turns_mean" in row and row["actor/grad_norm"] > 0 for row in training(replayed))


def test_an_environment_scores_turns_where_they_belong(task: AgentTask, tmp_path: Path) -> None:
    changes = ("agent.loop=environment", "agent.environment=vowels")
    with set_up(task.overrides(tmp_path / "run", *changes)) as trainer:
        batch = trainer.run.prompts.draw()
        for place, stage in zip(trainer.run.settings.places, trainer.run.stages, strict=True):
            batch = stage(batch)
            if place.name == "reward":
                break
        scores, mask, turns = (batch[name].unbind() for name in ("token_level_scores", "response_mask", "turn_ids"))
        records = trainer.run.generator.take()
        assert len(batch) == len(records) == 16
        for row, record in enumerate(records):
            expected = np.zeros(len(mask[row]), np.float32)
            for turn, reward in record.trajectory.turn_rewards.items():
                expected[np.flatnonzero(mask[row].numpy() & (turns[row].numpy() == turn))[-1]] = reward
            assert scores[row].tolist() == expected.tolist()
            assert len(record.trajectory.turn_rewards) == 3
        metrics = trainer.run.recorder.take()
        assert metrics["reward/vowels"] == metrics["reward/mean"] > 0
        # A validation is scored by the environment too.
        validated = trainer.validate()
        assert validated["val/samples"] == 3
        assert 0 <= validated["val/reward"] <= 3


def test_rewards_of_tools_are_added_to_the_answers(task: AgentTask, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    launch(task.overrides(run_dir, "agent.tools.letters.reward=10.0", "trainer.total_steps=1"))
    records = list(load_records(record_path(run_dir, 1)))
    for record in records:
        given = sum(record.trajectory.turn_rewards.values())
        assert 0 < record.score - given < 9
    assert any(record.trajectory.turn_rewards for record in records)


def test_rollouts_that_fail_are_dropped_or_masked(task: AgentTask, tmp_path: Path) -> None:
    changes = (
        "agent.loop=environment",
        "agent.environment=dying",
        "trainer.total_steps=1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
    )
    for treatment in ("drop", "mask"):
        Dying.count = 0
        run_dir = tmp_path / treatment
        with set_up(task.overrides(run_dir, *changes, f"agent.on_failure={treatment}")) as trainer:
            trainer.train_step()
            metrics = trainer.metrics
        records = list(load_records(record_path(run_dir, 1)))
        failed = [each for each in records if each.trajectory.failure is not None]
        assert 0 < len(failed) < 16
        assert metrics["agent/failures/environment"] == metrics["agent/failures"] == len(failed)
        assert {each.trajectory.failure.boundary for each in failed} == {"environment"}
        kept = [each.score is not None for each in failed]
        assert not any(kept) if treatment == "drop" else any(kept)
        assert all(each.score == 0 for each in failed if each.score is not None)


def test_a_step_in_which_everything_fails_says_why(task: AgentTask, tmp_path: Path) -> None:
    class Broken(Dying):
        async def reset(self, task):
            raise OSError("no world")

    changes = ("agent.loop=environment", "agent.environment=broken", "trainer.val_before_train=false")
    with (
        environments.temporarily("broken", Broken),
        pytest.raises(
            RolloutError, match=r"all 16 rollouts of step 1 failed: 16 in the environment; the first: .*no world"
        ),
    ):
        launch(task.overrides(tmp_path / "run", *changes))


def test_a_step_without_room_for_a_reply_says_so(task: AgentTask, tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match=r"all 16 rollouts of step 1 failed: 16 ended with length before a reply"):
        launch(task.overrides(tmp_path / "run", "agent.max_total_tokens=8", "trainer.val_before_train=false"))


class Twice(BaseAgentLoop):
    """Two contexts in a rollout: the second knows nothing of the first."""

    async def run(self, task, session, environment):
        await session.sample(task["prompt"])
        reply = await session.sample([{"role": "user", "content": "say it anew"}])
        return Outcome(messages=[{"role": "assistant", "content": reply.message.text}], reward=float(task["index"] % 3))


def test_two_trajectories_of_a_rollout_are_two_rows_and_one_sample(task: AgentTask, tmp_path: Path) -> None:
    changes = ("agent.loop=twice", "trainer.total_steps=1", "algorithm.norm_adv_by_std_in_grpo=false")
    with agent_loops.temporarily("twice", Twice), set_up(task.overrides(tmp_path / "run", *changes)) as trainer:
        batch = trainer.run.prompts.draw()
        uid = None
        for stage in trainer.run.stages:
            batch = stage(batch)
            uid = batch["uid"]
        assert len(batch) == 32
        index, final = batch["rollout_index"], batch["is_final"]
        assert index.bincount().tolist() == [2] * 16
        assert index[final].tolist() == list(range(16))
        assert uid.bincount().tolist() == [8] * 4
        # The whole reward stands once, on the final row.
        sums = torch.stack([row.sum() for row in batch["token_level_scores"].unbind()])
        assert sums[final.logical_not()].abs().max() == 0
        assert sums[final].tolist() == [float(each % 3) for each in batch["index"][final].tolist()]
        metrics = trainer.run.recorder.take()
        assert (metrics["agent/trajectories"], metrics["agent/forks_mean"]) == (2, 1)
        assert metrics["reward/mean"] == pytest.approx(float(sums[final].mean()))
        validated = trainer.validate()
        assert validated["val/samples"] == 3
        assert validated["val/reward"] == pytest.approx(1.0)  # rows 0, 1 and 2


def test_a_resumed_run_equals_an_undisturbed_one(task: AgentTask, tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    launch(task.overrides(whole))
    launch(task.overrides(resumed, "trainer.total_steps=1"))
    launch(task.overrides(resumed))
    for step in (1, 2):
        first, second = (
            [
                [segment.token_ids.tolist() for segment in each.segments]
                for each in load_trajectories(record_path(d, step))
            ]
            for d in (whole, resumed)
        )
        assert first == second
    left, right = (
        {k: v for k, v in read_metrics(each)[-1].items() if not k.startswith(("time/", "perf/", "agent/tool/"))}
        for each in (whole, resumed)
    )
    for rows in (left, right):
        rows.pop("rollout/tokens_per_s")
    assert left == right


@pytest.mark.exhaustive
def test_loops_run_against_replicas_with_sticky_sessions(task: AgentTask, tmp_path: Path) -> None:
    changes = ("rollout.weight_sync=shared_memory", "trainer.total_steps=1", "trainer.test_freq=-1")
    with set_up(task.overrides(tmp_path / "run", *changes)) as trainer:
        assert "agent_loop" in trainer.run.groups
        trainer.train_step()
        metrics = trainer.metrics
    assert metrics["agent/ends/done"] + metrics["agent/ends/max_turns"] + metrics["agent/ends/length"] == 1
    assert metrics["agent/tool_calls_mean"] > 0
    gaps = [row["sync/canary_gap"] for row in read_metrics(tmp_path / "run") if "sync/canary_gap" in row]
    assert gaps
    # The actor computes what the replica recorded.
    assert metrics["rollout/logprob_gap_max"] < 1e-4


def test_agents_beside_the_actor_are_not_placed_elsewhere(task: AgentTask, tmp_path: Path) -> None:
    changes = ("placement.pools={more: [1]}", "placement.mapping={agent_loop_in_process: more}")
    with pytest.raises(ConfigError, match=r"placement\.mapping\.agent_loop_in_process is another pool"):
        launch(task.overrides(tmp_path / "run", *changes))


def test_a_program_is_trained_through_the_gateway(task: AgentTask, tmp_path: Path) -> None:
    changes = ("agent.loop=program", "agent.program=agent_runs:chat", "trainer.total_steps=1", "trainer.test_freq=-1")
    launch(task.overrides(tmp_path / "run", *changes))
    metrics = read_metrics(tmp_path / "run")[-1]
    assert (metrics["agent/turns_mean"], metrics["agent/forks_mean"], metrics["agent/failures"]) == (2, 0, 0)
    assert metrics["reward/mean"] == 2
    assert metrics["rollout/logprob_gap_max"] < 1e-5


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "changes",
    [
        ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=3"),
        ("algorithm.adv_estimator=remax",),
        ("algorithm.adv_estimator=gae",),
        ("algorithm.adv_estimator=gae_turn",),
        ("algorithm.adv_estimator=gigpo",),
        ("actor.use_kl_loss=true", "algorithm.rollout_correction.rollout_is=token"),
    ],
)
def test_agents_go_with_other_stages(task: AgentTask, tmp_path: Path, changes: tuple[str, ...]) -> None:
    launch(task.overrides(tmp_path / "run", *changes, "trainer.total_steps=1", "trainer.test_freq=-1"))
    metrics = read_metrics(tmp_path / "run")[-1]
    assert metrics["agent/tool_calls_mean"] > 0
    assert metrics["actor/grad_norm"] > 0
    records = list(load_records(record_path(tmp_path / "run", 1)))
    # With further batches for groups that are alike, all of them are saved.
    assert len({each.trajectory.rollout_id for each in records}) == 16 * metrics.get("rollout/gen_batches", 1)


@pytest.mark.exhaustive
def test_a_run_waits_for_its_only_replica(task: AgentTask, tmp_path: Path) -> None:
    changes = (
        "rollout.weight_sync=shared_memory",
        "rollout.mode=colocated",
        "agent.loop=environment",
        "agent.environment=killing",
        f"agent.environment_kwargs.once={tmp_path / 'killed'}",
        "trainer.total_steps=1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
    )
    with environments.temporarily("killing", Killing):
        launch(task.overrides(tmp_path / "run", *changes))
    assert (tmp_path / "killed").exists()
    metrics = read_metrics(tmp_path / "run")[-1]
    assert (metrics["agent/rollouts"], metrics["agent/failures"]) == (16, 0)


def test_an_environment_needs_no_answer_no_prompt_and_no_reward(task: AgentTask, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": [], "number": 1}\n{"number": 2}\n{"prompt": "", "number": 3}\n' * 2
    )
    changes = (
        "agent.loop=environment",
        "agent.environment=vowels",
        "reward=exact_match",
        "~reward.reward_kwargs.path",
        "agent.max_total_tokens=60",  # some are cut before their last turn
        f"data.train_files=[{tmp_path / 'rows.jsonl'}]",
        f"data.val_files=[{tmp_path / 'rows.jsonl'}]",
        "trainer.total_steps=1",
        "trainer.test_freq=1",
    )
    overrides = [
        each
        for each in task.overrides(tmp_path / "run", *changes)
        if not each.startswith(("reward.reward_k", "~", "reward=function"))
    ]
    launch(overrides)
    metrics = read_metrics(tmp_path / "run")[-1]
    assert metrics["val/samples"] == 6
    # Greedy replies of random weights may have no vowel; sampled ones do.
    assert metrics["reward/mean"] > 0
