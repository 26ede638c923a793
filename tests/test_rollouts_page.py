"""The rollout of docs/rollouts.md: built, installed beside everything else, and trained with.

It is held to its suite in test_new_packages.py: the page shows the template of ``rollcast new plugin rollout``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from page_packages import PagePackage
from run_commands import read_metrics

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> PagePackage:
    return PagePackage("rollouts.md", "rollcast-plain", tmp_path_factory.mktemp("plain"))


@pytest.mark.exhaustive
def test_trains(plain: PagePackage, tmp_path: Path) -> None:
    settings = [
        *("recipe=quickstart", "runtime=local", "rollout.n=2", "trainer.total_steps=1", "trainer.save_freq=-1"),
        *("data.train_batch_size=4", "actor.ppo_mini_batch_size=4", "data.val_files=[]", "trainer.warm_start=null"),
    ]
    first, second = tmp_path / "first", tmp_path / "second"
    plain.rollcast("train", *settings, f"run_dir={first}", "model.random_init=true")
    plain.rollcast("train", *settings, f"run_dir={second}", "rollout=plain", f"model.path={first}/export")
    (row,) = read_metrics(second)
    assert row["rollout/logprob_gap_max"] < 1e-4
    assert row["sync/canary_gap"] < 1e-4
