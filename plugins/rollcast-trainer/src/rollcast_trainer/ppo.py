"""Trainer ``ppo``: policy optimisation with sampled responses; the config selects PPO, GRPO or a relative."""

from __future__ import annotations

import logging
from typing import ClassVar

from rollcast_trainer.batch.columns import DATA
from rollcast_trainer.batch.sizes import BatchAlgebra, data_parallel_size, pass_tokens
from rollcast_trainer.loop import LoopTrainer
from rollcast_trainer.run.settings import RunSettings
from rollcast_trainer.run.supply import Changes, Place, declare_stages, supply
from rollcast_trainer.schemas import PpoConfig
from rollcast_trainer.stages.replay import replayed_places

__all__ = ["PpoTrainer"]

logger = logging.getLogger(__name__)


class PpoTrainer(LoopTrainer):
    """Trainer that runs the registered stages needed to update the policy, with the recipe's changes."""

    schema = PpoConfig
    #: Stages that a step must run; the stages that they depend on are added.
    goals: ClassVar[tuple[str, ...]] = ("update_actor",)

    @classmethod
    def list_stages(cls, settings: RunSettings) -> list[Place]:
        chosen = settings.trainer.stages
        changes = Changes(chosen.insert, chosen.replace, chosen.remove)
        places = supply(cls.goals, declare_stages(settings, changes), DATA, changes)
        return places if settings.replay_of is None else replayed_places(places)

    @classmethod
    def algebra(cls, settings: RunSettings) -> BatchAlgebra:
        policy = settings.actor
        return BatchAlgebra(
            settings.data.train_batch_size,
            settings.rollout.n,
            policy.ppo_mini_batch_size,
            policy.ppo_epochs,
            data_parallel_size(settings.engine, settings.world_size),
            policy.ppo_micro_batch_size_per_gpu,
            pass_tokens(policy, settings.engine),
        )

    def setup(self) -> None:
        logger.info("%s", self.run.settings.algebra.describe())
        super().setup()
