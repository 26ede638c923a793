"""Trainer ``sft``: supervised fine-tuning on prompts and responses, validated by generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from rollcast import WorkerGroup
from rollcast.contracts.worker import ClassWithInitArgs
from rollcast.errors import ConfigError
from rollcast.protocol import DataProto
from rollcast_algorithms.losses import SftLoss
from rollcast_trainer.loop import LoopTrainer, Timer
from rollcast_trainer.roles import Role
from rollcast_trainer.schemas import SftConfig
from rollcast_trainer.task_runner import TaskRunner
from rollcast_trainer.workers import ActorRolloutRefWorker

__all__ = ["SftTrainer"]

_COLUMNS = ["input_ids", "attention_mask", "position_ids", "responses", "response_mask"]


class SftTrainer(LoopTrainer):
    """One optimizer step a batch; ends early at a goal on the validation files (``trainer.stop_at``)."""

    schema = SftConfig

    def __init__(self, task: TaskRunner) -> None:
        super().__init__(task)
        task.trainer.check()
        self._highest = float("-inf")  # of trainer.stop_at.metric

    def start_workers(self) -> dict[Role, WorkerGroup]:
        # A rollout's temperature has no part in a supervised loss.
        settings = replace(self.forward_settings(), temperature=1.0)
        setup = self.task.worker_setup(
            optim=self.scheduled(self.task.actor.optim),
            loss_function=SftLoss(),
            has_reference=False,
            forward=settings,
            infer=settings,
        )
        return self.task.start_roles({Role.ACTOR_ROLLOUT: ClassWithInitArgs(ActorRolloutRefWorker, setup)})

    def load_val_batches(self) -> list[DataProto]:
        """Return the prompts of supervised rows; a generated response is compared with the row's own.

        Raises:
            ConfigError: ``trainer.stop_at`` has nothing to measure.
        """
        goal = self.task.trainer.stop_at
        if goal.value is not None and not self.task.data.val_files:
            raise ConfigError(
                f"trainer.stop_at.value is {goal.value:g}, but data.val_files is empty, so {goal.metric} is never "
                "measured; give at least one file, or leave trainer.stop_at.value empty"
            )
        return self.task.val_batches("prompts", ground_truth_key=self.task.data.response_key)

    def should_stop(self) -> bool:
        goal = self.task.trainer.stop_at.value
        return goal is not None and self._highest >= goal

    def validate(self) -> dict[str, float]:
        metrics, goal = super().validate(), self.task.trainer.stop_at
        if goal.metric in metrics:
            self._highest = max(self._highest, metrics[goal.metric])
        elif goal.value is not None:
            raise ConfigError(
                f"trainer.stop_at.metric is {goal.metric!r}, which the validation does not measure; "
                f"it measures {', '.join(sorted(metrics))}"
            )
        return metrics

    def state_dict(self) -> dict[str, Any]:
        reached = self._highest if self._highest > float("-inf") else None
        return {"stop_at": {"metric": self.task.trainer.stop_at.metric, "highest": reached}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        kept = state.get("stop_at", {})
        # The goal may be another now, and its metric too.
        if kept.get("metric") == self.task.trainer.stop_at.metric and kept["highest"] is not None:
            self._highest = float(kept["highest"])

    def train_step(self, batch: DataProto, timer: Timer) -> dict[str, float]:
        rows = batch.select(_COLUMNS)
        with timer.phase("update_actor"):
            metrics = self.update(Role.ACTOR_ROLLOUT, "update_actor", rows, [torch.arange(len(rows))])
        tokens = float(rows["response_mask"].sum())
        renamed = {key.replace("actor/", "sft/"): value for key, value in metrics.items()}
        return {**renamed, "sft/tokens": tokens, "sft/tokens_per_s": tokens / max(timer.seconds["update_actor"], 1e-9)}
