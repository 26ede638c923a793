"""The seeds of generated rows: new for every batch, and the same for the same batch of the same run."""

from __future__ import annotations

from pathlib import Path

import torch
from trainer_tools import SmallTask, launch, read_metrics

from rollcast_trainer.run.seeds import RowSeeds


def test_seeds_follow_from_run_purpose_and_number() -> None:
    def drawn(seed: int, purpose: str) -> list[list[int]]:
        seeds = RowSeeds(seed)
        seeds.begin("something before")
        seeds.draw(5)
        seeds.begin(purpose)
        return [seeds.draw(7).tolist(), seeds.draw(7).tolist()]

    assert drawn(3, "step 4") == drawn(3, "step 4")
    every = [*drawn(3, "step 4"), *drawn(3, "step 5"), *drawn(4, "step 4"), *drawn(3, "validation 4")]
    flat = torch.tensor(every).flatten()
    assert len(flat.unique()) == len(flat)
    assert int(flat.min()) >= 0


def test_validating_changes_no_sample_of_the_training(small_task: SmallTask, tmp_path: Path) -> None:
    often, never = tmp_path / "often", tmp_path / "never"
    changes = ["trainer.save_freq=-1", "trainer.total_steps=3", "rollout.val_kwargs.temperature=1"]
    launch(small_task.ppo(often, *changes, "trainer.test_freq=1"))
    launch(small_task.ppo(never, *changes, "trainer.test_freq=-1", "trainer.val_before_train=false"))
    rows = [{row["step"]: row for row in read_metrics(run_dir)} for run_dir in (often, never)]
    for step in (1, 2, 3):
        for key in ("reward/mean", "actor/entropy", "actor/grad_norm"):
            assert rows[0][step][key] == rows[1][step][key]
