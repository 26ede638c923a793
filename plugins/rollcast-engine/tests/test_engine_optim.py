"""Learning-rate schedules."""

from __future__ import annotations

from rollcast.contracts.engine import OptimConfig
from rollcast_engine.optim import learning_rate


def test_schedule_ends_at_its_floor() -> None:
    optim = OptimConfig(lr=2.0, lr_scheduler_type="linear", total_training_steps=4, min_lr_ratio=0.25)
    assert [learning_rate(optim, step) for step in (0, 2, 4, 9)] == [2.0, 1.25, 0.5, 0.5]
