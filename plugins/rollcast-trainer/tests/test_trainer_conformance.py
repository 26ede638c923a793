"""The trainers pass the suite that third parties are given."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollcast.contracts.trainer import trainers
from rollcast_testing import TrainerSuite
from rollcast_testing.trainer import TrainerTask

pytestmark = pytest.mark.long


class TestPpo(TrainerSuite):
    name = "ppo"

    def overrides(self, task: TrainerTask, run_dir: Path) -> list[str]:
        return [
            *super().overrides(task, run_dir),
            "reward=function",
            f"reward.reward_kwargs.path={task.reward}:has_digit",
            "rollout.n=2",
            "actor.ppo_mini_batch_size=2",
        ]


class TestSft(TrainerSuite):
    name = "sft"


def test_every_trainer_of_this_distribution_is_tested_here() -> None:
    ours = {name for name in trainers.names() if trainers.find(name).distribution == "rollcast-trainer"}
    assert ours == {"ppo", "sft"}
