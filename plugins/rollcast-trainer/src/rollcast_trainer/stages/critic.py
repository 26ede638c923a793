"""Stages of the critic: values of the states, and the critic's update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rollcast.contracts.algorithm import loss_aggregations
from rollcast.contracts.stage import StageSpec
from rollcast.protocol import DataProto
from rollcast_algorithms.value_loss import ValueLoss
from rollcast_trainer.batch.columns import MODEL, refuse_images
from rollcast_trainer.batch.mini_batches import draw_mini_batches
from rollcast_trainer.batch.rollouts import ROLLOUT, rollouts_of
from rollcast_trainer.run.run import Run
from rollcast_trainer.run.settings import RunSettings
from rollcast_trainer.run.setups import ModelNeeds, TrainingStage
from rollcast_trainer.schemas import CriticConfig
from rollcast_trainer.workers.critic import CriticWorker
from rollcast_trainer.workers.roles import Role

__all__ = ["UpdateCritic", "Values"]


class Values(TrainingStage):
    """Stage that writes ``values``, jagged float32: the critic's value of the state before each token."""

    phase: ClassVar[str] = "values"
    spec: ClassVar[StageSpec] = StageSpec(
        reads=MODEL, writes=("values",), roles=(Role.CRITIC,), after=("filter_groups",), brings=("update_critic",)
    )

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._config: CriticConfig = run.section("critic", CriticConfig)

    def needs(self) -> Sequence[ModelNeeds]:
        path, rows = self._config.model.path, self._config.ppo_micro_batch_size_per_gpu
        return [ModelNeeds(Role.CRITIC, path=path, micro_batch_size=rows, update_micro_batch_size=rows)]

    def __call__(self, batch: DataProto) -> DataProto:
        refuse_images(batch, "a critic")
        critic = self.run.role_group(Role.CRITIC)
        return batch.joined(critic.infer(CriticWorker.compute_values, batch.select(MODEL), ["values"]))


class UpdateCritic(TrainingStage):
    """Stage that starts the critic's update on mini-batches of all rows, one optimizer step each.

    The update runs beside later stages on other pools.
    """

    phase: ClassVar[str] = "update_critic"
    spec: ClassVar[StageSpec] = StageSpec(reads=("values", "returns"), optional=(ROLLOUT,), roles=(Role.CRITIC,))

    @classmethod
    def declare(cls, settings: RunSettings) -> StageSpec:
        loss_aggregations.get(settings.section("critic", CriticConfig).loss_agg_mode, "critic.loss_agg_mode")
        return cls.spec

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._config: CriticConfig = run.section("critic", CriticConfig)

    def needs(self) -> Sequence[ModelNeeds]:
        loss = ValueLoss(loss_aggregations.get(self._config.loss_agg_mode), self._config.cliprange_value)
        return [ModelNeeds(Role.CRITIC, optim=self._config.optim, loss_function=loss)]

    def __call__(self, batch: DataProto) -> DataProto:
        critic, policy = self._config, self.run.settings.actor
        prompts = critic.ppo_mini_batch_size or policy.ppo_mini_batch_size
        count = max(self.run.settings.data.train_batch_size // prompts, 1)
        seed = self.run.order_seed(1)
        mini_batches, epochs = draw_mini_batches(len(batch), count, critic.ppo_epochs, seed, rollouts_of(batch))
        columns = batch.select([*MODEL, "values", "returns", *(name for name in (ROLLOUT,) if name in batch)])
        group = self.run.role_group(Role.CRITIC)
        self.run.follow(self.phase, group.update(CriticWorker.update_critic, columns, mini_batches, epochs))
        return batch
