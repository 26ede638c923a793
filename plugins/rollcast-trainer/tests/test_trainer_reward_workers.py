"""Rewards in a pool of their own: the same run, scored after each batch and as each group ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainer_tools import SmallTask, launch, read_jsonl, read_metrics

from rollcast.errors import ConfigError

pytestmark = pytest.mark.long

POOL = ["placement.pools={rewards: {processes: [1], device: cpu}}", "placement.mapping={reward: rewards}"]
BESIDE = ["rollout.mode=colocated", "rollout.weight_sync=shared_memory", "rollout.replica.env={OMP_NUM_THREADS: '1'}"]


def scores(run_dir: Path) -> list[dict[str, float]]:
    return [{key: row[key] for key in row if key.startswith(("reward/", "val/"))} for row in read_metrics(run_dir)]


def test_workers_change_no_score(small_task: SmallTask, tmp_path: Path) -> None:
    changes = ["trainer.total_steps=2"]
    launch(small_task.ppo(tmp_path / "here", *changes))
    launch(small_task.ppo(tmp_path / "there", *changes, *POOL))
    assert scores(tmp_path / "there") == scores(tmp_path / "here")
    pools = read_jsonl(tmp_path / "there" / "timeline.jsonl")[-1]["pools"]
    assert pools["rewards"]["calls"]["reward"]


@pytest.mark.parametrize("place", ["here", "there"])
def test_functions_of_trl_get_batch_and_progress(small_task: SmallTask, tmp_path: Path, place: str) -> None:
    (tmp_path / "mine.py").write_text(
        "def step(prompts, completions, trainer_state, log_metric, **kwargs):\n"
        "    log_metric('samples', len(completions))\n"
        "    return [10 * trainer_state.max_steps + trainer_state.global_step + len(p) / 100 for p in prompts]\n"
    )
    chosen = [
        "reward.name=trl",
        "~reward.reward_kwargs.path",
        f"+reward.reward_kwargs.reward_funcs=['{tmp_path / 'mine.py'}:step']",
    ]
    changes = [*chosen, "trainer.total_steps=2", "data.val_files=[]", *(POOL if place == "there" else [])]
    launch(small_task.ppo(tmp_path / "run", *changes))
    rows = [row for row in read_metrics(tmp_path / "run") if "reward/mean" in row]
    assert [row["reward/mean"] for row in rows] == pytest.approx([20.04, 21.04], abs=0.02)
    assert [row["reward/step/samples"] for row in rows] == [16, 16]


@pytest.mark.exhaustive
def test_groups_are_scored_by_workers_as_they_end(small_task: SmallTask, tmp_path: Path) -> None:
    changes = [*BESIDE, *POOL, "trainer.max_staleness=1", "trainer.total_steps=3", "data.val_files=[]"]
    launch(small_task.ppo(tmp_path, *changes))
    rows = [row for row in read_metrics(tmp_path) if "reward/mean" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["reward/max"] == 1.0 for row in rows)


def test_a_device_that_is_none_is_named(small_task: SmallTask, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"placement\.pools\.rewards\.device is 'tpux'; valid: auto, .*cpu"):
        launch(small_task.ppo(tmp_path, *(each.replace("device: cpu", "device: tpux") for each in POOL)))
