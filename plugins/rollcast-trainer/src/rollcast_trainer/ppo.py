"""Trainer ``ppo``: policy optimisation with sampled responses; the config selects PPO, GRPO or a relative."""

from __future__ import annotations

import logging
from typing import ClassVar

from rollcast.contracts.stage import Stage, stages
from rollcast_trainer.batch.columns import DATA
from rollcast_trainer.batch.sizes import BatchAlgebra, data_parallel_size, pass_tokens
from rollcast_trainer.loop import LoopTrainer
from rollcast_trainer.run.replay import replayed_places
from rollcast_trainer.run.supply import Changes, Place, declare_stages, supply
from rollcast_trainer.run.task_runner import TaskRunner
from rollcast_trainer.schemas import PpoConfig
from rollcast_trainer.stages.replay import ReplayedRollouts

__all__ = ["PpoTrainer"]

logger = logging.getLogger(__name__)


class PpoTrainer(LoopTrainer):
    """Trainer that runs the registered stages needed to update the policy, with the recipe's changes.

    Attributes:
        algebra: sizes of a step.
    """

    schema = PpoConfig
    #: Stages that a step must run; the stages that they depend on are added.
    goals: ClassVar[tuple[str, ...]] = ("update_actor",)

    def __init__(self, task: TaskRunner) -> None:
        self.algebra = _build_algebra(task)
        super().__init__(task)

    def build_stages(self) -> list[tuple[Place, Stage]]:
        chosen = self.task.trainer.stages
        changes = Changes(chosen.insert, chosen.replace, chosen.remove)
        places = supply(self.goals, declare_stages(self.run, changes), DATA, changes)
        self.run.use(places)
        if self.task.replay_of is None:
            return [(place, stages.get(place.name)(self.run)) for place in places]
        replay, *rest = replayed_places(places)
        built = [(place, stages.get(place.name)(self.run)) for place in rest]
        return [(replay, ReplayedRollouts(self.run, self.record)), *built]

    def setup(self) -> None:
        logger.info("%s", self.algebra.describe())
        super().setup()


def _build_algebra(task: TaskRunner) -> BatchAlgebra:
    """Return the sizes of a step.

    Raises:
        ConfigError: the sizes do not divide; the message names the nearest valid ones.
    """
    policy = task.actor
    algebra = BatchAlgebra(
        task.data.train_batch_size,
        task.rollout.n,
        policy.ppo_mini_batch_size,
        policy.ppo_epochs,
        data_parallel_size(task.engine, task.world_size),
        policy.ppo_micro_batch_size_per_gpu,
        pass_tokens(policy, task.engine),
    )
    algebra.check()
    return algebra
