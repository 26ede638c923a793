"""The stage of a run that trains on recorded rollouts (``trainer.replay``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rollcast.contracts.stage import StageSpec
from rollcast.protocol import DataProto
from rollcast_trainer.run.setups import TrainingStage
from rollcast_trainer.run.supply import Place

__all__ = ["ReplayedRollouts", "replayed_places"]


class ReplayedRollouts(TrainingStage):
    """Stage that reads the recorded batch of the step; it replaces the stages that generated and scored it."""

    phase: ClassVar[str] = "replay"

    def __call__(self, batch: DataProto) -> DataProto:
        run = self.run
        replayed, metrics = run.rollout_record.read(run.step)
        run.record(metrics)
        run.emit_batch(run.hook.on_batch_after_rollout, replayed)
        run.emit_batch(run.hook.on_batch_after_reward, replayed)
        return replayed


def replayed_places(places: Sequence[Place]) -> list[Place]:
    """Return the stages of a replay: first the replay itself, then all stages that are not recorded."""
    writes = tuple(dict.fromkeys(name for place in places if place.spec.is_recorded for name in place.spec.writes))
    replay = Place("replay", StageSpec(writes=writes), "trainer.replay", ReplayedRollouts)
    return [replay, *(place for place in places if not place.spec.is_recorded)]
