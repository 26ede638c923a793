"""Validation of a run with several samples a prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainer_tools import SmallTask, launch, read_jsonl, read_metrics

from rollcast.errors import ConfigError


def test_a_run_with_four_samples_a_prompt(small_task: SmallTask, tmp_path: Path) -> None:
    several = ["rollout.val_kwargs.n=4", "rollout.val_kwargs.temperature=1.0", "trainer.log_val_generations=6"]
    launch(small_task.ppo(tmp_path, *several, "trainer.total_steps=1", "trainer.save_freq=-1"))
    rows = read_metrics(tmp_path)
    for row in rows:
        assert row["val/samples"] == 20
        assert row["val/acc/mean@4"] == pytest.approx(row["val/accuracy"])
        for name in ("best@4", "maj@2"):
            low, mean, high = (row[f"val/acc/{name}/{end}"] for end in ("low", "mean", "high"))
            assert 0 <= low <= mean <= high <= 1
        assert row["val/acc/best@4/mean"] >= row["val/acc/best@2/mean"] >= row["val/acc/mean@4"]
    assert 0 < rows[0]["val/accuracy"] < 1
    logged = read_jsonl(tmp_path / "samples.jsonl")
    assert [sample["step"] for sample in logged] == [0] * 6 + [1] * 6
    assert [sample["prompt"] for sample in logged[:6]] == [sample["prompt"] for sample in logged[6:]]
    assert len({sample["prompt"] for sample in logged}) > 2


def test_a_negative_number_of_logged_samples_is_refused(small_task: SmallTask, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer.log_val_generations must be -1 or at least 0, got -2"):
        launch(small_task.ppo(tmp_path / "run", "trainer.log_val_generations=-2"))
