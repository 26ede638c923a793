"""Runs whose reward fails on some samples, and whose trackers fail."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from trainer_tools import SmallTask, launch, read_jsonl, read_metrics

from rollcast.contracts.hooks import hookimpl
from rollcast.contracts.tracker import BaseTracker, trackers
from rollcast.errors import ConfigError, RewardError


def with_reward(task: SmallTask, folder: Path, body: str, *changes: str) -> list[str]:
    """A reward that goes by the sample's number, from 0."""
    (folder / "mine.py").write_text(
        "import itertools, time\ncount = itertools.count()\n\n\n"
        f"def score(sample):\n    number = next(count)\n    {body}\n    return float(number % 2)\n"
    )
    path = f"reward.reward_kwargs.path={folder / 'mine.py'}:score"
    return task.ppo(folder / "run", path, "data.val_files=[]", *changes)


@pytest.mark.parametrize("policy", ["zero", "drop"])
def test_a_run_bears_bad_samples(small_task: SmallTask, tmp_path: Path, policy: str) -> None:
    """Of 16 samples a step the fifth raises; all of a step's first mini-batch might be it."""
    arguments = with_reward(
        small_task,
        tmp_path,
        "if number % 16 == 5: raise KeyError('no answer')",
        f"reward.on_error={policy}",
        "reward.max_bad_share=0.1",
    )
    result = launch(arguments)
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, result.step + 1))
    assert all(row["reward/errors"] == 1 for row in rows)
    # Odd numbers score 1: 7 of 16 are left, or 7 of 15.
    expected = 7 / 16 if policy == "zero" else 7 / 15
    assert [row["reward/mean"] for row in rows] == pytest.approx([expected] * len(rows))


@pytest.mark.parametrize("policy", ["zero", "drop"])
def test_a_validation_counts_bad_samples_as_wrong(small_task: SmallTask, tmp_path: Path, policy: str) -> None:
    """Of five, the second is bad and the fourth right: leaving the bad one out would make the accuracy higher."""
    changes = [f"reward.on_error={policy}", "reward.max_bad_share=0.3", "trainer.total_steps=1", "trainer.save_freq=-1"]
    body = "if number == 1: raise KeyError('no answer')"
    files = f"data.val_files=[{small_task.folder / 'test.jsonl'}]"
    launch(with_reward(small_task, tmp_path, body, *changes, files, "trainer.test_freq=-1"))
    row = read_metrics(tmp_path / "run")[0]
    assert (row["step"], row["val/samples"]) == (0, 5)
    assert row["val/accuracy"] == row["val/acc/mean@1"] == row["val/reward"] == pytest.approx(1 / 5)
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert ["no answer" in sample.get("error", "") for sample in samples] == [False, True, False, False, False]


def test_too_many_bad_samples_end_the_run(small_task: SmallTask, tmp_path: Path) -> None:
    body = "if number % 4 == 0: return float('nan')"
    arguments = with_reward(small_task, tmp_path, body, "reward.on_error=drop", "reward.max_bad_share=0.2")
    with pytest.raises(RewardError, match=r"(?s)4 of 16 samples got no score \(value: 4\), and reward.max_bad_share"):
        launch(arguments)


def test_no_sample_left(small_task: SmallTask, tmp_path: Path) -> None:
    arguments = with_reward(small_task, tmp_path, "return None", "reward.on_error=drop", "reward.max_bad_share=1.0")
    with pytest.raises(RewardError, match=r"no sample of step 1 has a score: .*which is not a number"):
        launch(arguments)


@pytest.mark.parametrize("manager", ["naive", "prime"])
def test_a_hang_is_told_with_its_sample(small_task: SmallTask, tmp_path: Path, manager: str) -> None:
    body = "if number == 3: time.sleep(3600)"
    arguments = with_reward(small_task, tmp_path, body, f"reward.reward_manager={manager}", "reward.timeout_s=1")
    with pytest.raises(RewardError, match=r"(?s)took longer than reward.timeout_s = 1 s.*sample 3 of 16"):
        launch(arguments)


def test_the_overlong_penalty_knows_the_longest_response(small_task: SmallTask, tmp_path: Path) -> None:
    changes = ["reward.reward_manager=dapo", "reward.reward_manager_kwargs.overlong_buffer.len=6"]
    launch(with_reward(small_task, tmp_path, "return 0.0", *changes, "data.max_response_length=6"))
    rows = read_metrics(tmp_path / "run")
    # Every token of the six costs a sixth.
    assert [row["reward/overlong_penalty"] for row in rows] == pytest.approx(
        [-row["rollout/response_length_mean"] / 6 for row in rows]
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("reward.on_error=ignore", "reward.on_error must be one of stop, zero, drop, got 'ignore'"),
        ("reward.reward_manager_kwargs.threads=2", "do not fit the manager 'naive'"),
        ("tracker_kwargs.jsonl.file=x", "tracker_kwargs.jsonl: there is no option 'file'"),
        ("tracker_kwargs.wandb.project_name=x", "tracker_kwargs.wandb is set, but trackers has no 'wandb'"),
    ],
)
def test_settings_that_are_refused(small_task: SmallTask, tmp_path: Path, change: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        launch(with_reward(small_task, tmp_path, "pass", change))


class Broken(BaseTracker):
    @hookimpl
    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        raise OSError("the server is gone")

    def close(self) -> None:
        raise OSError("and does not come back")


@pytest.fixture
def broken() -> Iterator[str]:
    trackers.register("test_broken", Broken)
    yield "test_broken"
    trackers.unregister("test_broken")


def test_a_tracker_that_fails_never_stops_training(
    small_task: SmallTask, tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    arguments: list[Any] = small_task.ppo(tmp_path / "run", f"trackers=[{broken},jsonl]", "data.val_files=[]")
    result = launch(arguments)
    assert len(read_metrics(tmp_path / "run")) == result.step
    told = [record.getMessage() for record in caplog.records if "test_broken" in record.getMessage()]
    assert "the server is gone" in told[0]
    assert len(told) == 2
