"""The stage of a run that trains on recorded rollouts (``trainer.replay``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollcast.contracts.stage import Stage
from rollcast.protocol import DataProto

if TYPE_CHECKING:
    from rollcast_trainer.run.replay import RolloutRecord
    from rollcast_trainer.run.training_run import TrainingRun

__all__ = ["ReplayedRollouts"]


class ReplayedRollouts(Stage):
    """Stage that reads the recorded batch of the step; it replaces the stages that generated and scored it."""

    run: TrainingRun
    phase = "replay"

    def __init__(self, run: TrainingRun, record: RolloutRecord) -> None:
        super().__init__(run)
        self._record = record

    def __call__(self, batch: DataProto) -> DataProto:
        replayed, metrics = self._record.read(self.run.step)
        self.run.record(metrics)
        self.run.emit_batch("on_batch_after_rollout", replayed)
        self.run.emit_batch("on_batch_after_reward", replayed)
        return replayed
