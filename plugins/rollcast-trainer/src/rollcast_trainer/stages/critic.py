"""Stages of the critic: values of the states, and the critic's update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from rollcast.contracts.algorithm import loss_aggregations, try_loss_aggregation
from rollcast.contracts.stage import Stage, StageSpec
from rollcast.protocol import DataProto
from rollcast_algorithms.value_loss import ValueLoss
from rollcast_trainer.batch.columns import MODEL, refuse_images
from rollcast_trainer.batch.mini_batches import draw_mini_batches
from rollcast_trainer.batch.rollouts import ROLLOUT, rollouts_of
from rollcast_trainer.run.training_run import TrainingRun
from rollcast_trainer.schemas import CriticConfig
from rollcast_trainer.workers.critic import CriticWorker
from rollcast_trainer.workers.roles import Role

__all__ = ["UpdateCritic", "Values"]


class Values(Stage):
    """Stage that writes ``values``, jagged float32: the critic's value of the state before each token."""

    run: TrainingRun
    phase: ClassVar[str] = "values"
    spec: ClassVar[StageSpec] = StageSpec(
        reads=MODEL, writes=("values",), roles=(Role.CRITIC,), after=("filter_groups",), brings=("update_critic",)
    )

    def __init__(self, run: TrainingRun) -> None:
        super().__init__(run)
        self._config: CriticConfig = run.section("critic", CriticConfig)

    def configure(self, role: str, setup: Any) -> Any:
        if role != Role.CRITIC:
            return setup
        config, path = self._config, self._config.model.path
        model = replace(
            setup.model, path=path or setup.model.path, random_init=setup.model.random_init and path is None
        )
        rows = config.ppo_micro_batch_size_per_gpu or setup.forward.micro_batch_size_per_gpu
        settings = replace(setup.forward, micro_batch_size_per_gpu=rows)
        return replace(setup, model=model, forward=settings, infer=settings)

    def __call__(self, batch: DataProto) -> DataProto:
        refuse_images(batch, "a critic")
        critic = self.run.role_group(Role.CRITIC)
        return batch.joined(critic.infer(CriticWorker.compute_values, batch.select(MODEL), ["values"]))


class UpdateCritic(Stage):
    """Stage that starts the critic's update on mini-batches of all rows, one optimizer step each.

    The update runs beside later stages on other pools.
    """

    run: TrainingRun
    phase: ClassVar[str] = "update_critic"
    spec: ClassVar[StageSpec] = StageSpec(reads=("values", "returns"), optional=(ROLLOUT,), roles=(Role.CRITIC,))

    @classmethod
    def declare(cls, run: TrainingRun) -> StageSpec:
        mode = run.section("critic", CriticConfig).loss_agg_mode
        aggregation = loss_aggregations.find(mode, "critic.loss_agg_mode")
        try_loss_aggregation(loss_aggregations.get(mode), f"critic.loss_agg_mode={mode} of {aggregation}")
        return cls.spec

    def __init__(self, run: TrainingRun) -> None:
        super().__init__(run)
        self._config: CriticConfig = run.section("critic", CriticConfig)

    def configure(self, role: str, setup: Any) -> Any:
        if role != Role.CRITIC:
            return setup
        loss = ValueLoss(loss_aggregations.get(self._config.loss_agg_mode), self._config.cliprange_value)
        return replace(setup, optim=self.run.schedule(self._config.optim), loss_function=loss)

    def __call__(self, batch: DataProto) -> DataProto:
        critic, policy = self._config, self.run.task.actor
        prompts = critic.ppo_mini_batch_size or policy.ppo_mini_batch_size
        count = max(self.run.task.data.train_batch_size // prompts, 1)
        seed = self.run.order_seed(1)
        mini_batches, epochs = draw_mini_batches(len(batch), count, critic.ppo_epochs, seed, rollouts_of(batch))
        columns = batch.select([*MODEL, "values", "returns", *(name for name in (ROLLOUT,) if name in batch)])
        group = self.run.role_group(Role.CRITIC)
        self.run.follow(self.phase, group.update(CriticWorker.update_critic, columns, mini_batches, epochs))
        return batch
