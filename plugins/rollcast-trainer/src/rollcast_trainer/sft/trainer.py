"""Trainer ``sft``: supervised fine-tuning on prompts and responses, validated by generation."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from rollcast.contracts.stage import Stage, StageSpec
from rollcast.errors import ConfigError
from rollcast.protocol import DataProto, Jagged
from rollcast_algorithms.losses import SftLoss
from rollcast_trainer.batch.columns import MODEL
from rollcast_trainer.loop import LoopTrainer
from rollcast_trainer.run.supply import Place
from rollcast_trainer.run.task_runner import TaskRunner
from rollcast_trainer.run.training_run import TrainingRun
from rollcast_trainer.schemas import SftConfig
from rollcast_trainer.workers.roles import Role

__all__ = ["SftTrainer", "UpdateSupervised"]


class UpdateSupervised(Stage):
    """Stage that takes one optimizer step on the batch's responses."""

    run: TrainingRun
    phase: ClassVar[str] = "update_actor"
    spec: ClassVar[StageSpec] = StageSpec(reads=MODEL, roles=(Role.ACTOR_ROLLOUT,))

    def configure(self, role: str, setup: Any) -> Any:
        # The rollout's temperature must not scale the logits of a supervised loss.
        settings = replace(setup.forward, temperature=1.0)
        return replace(setup, loss_function=SftLoss(), forward=settings, infer=settings)

    def __call__(self, batch: DataProto) -> DataProto:
        rows, start = batch.select(MODEL), time.perf_counter()
        metrics = self.run.actor.update_actor(rows, [torch.arange(len(rows))])
        tokens = float(Jagged.of(rows["response_mask"]).values.sum())
        self.run.record({key.replace("actor/", "sft/"): value for key, value in metrics.items()})
        rate = tokens / max(time.perf_counter() - start, 1e-9)
        self.run.record({"sft/tokens": tokens, "sft/tokens_per_s": rate})
        return batch


class SftTrainer(LoopTrainer):
    """A trainer with one optimizer step per batch; it can stop early at a validation goal (``trainer.stop_at``)."""

    schema = SftConfig

    def __init__(self, task: TaskRunner) -> None:
        super().__init__(task)
        self._highest = float("-inf")  # highest value so far of trainer.stop_at.metric

    def build_stages(self) -> list[tuple[Place, Stage]]:
        place = Place("update_supervised", UpdateSupervised.spec, "goal of the trainer")
        return [(place, UpdateSupervised(self.run))]

    def load_val_batches(self) -> list[DataProto]:
        """Return the prompts of supervised rows; each generated response is compared with the row's own response.

        Raises:
            ConfigError: ``trainer.stop_at`` is set, but there are no validation files.
        """
        goal = self.task.trainer.stop_at
        if goal.value is not None and not self.task.data.val_files:
            raise ConfigError(
                f"trainer.stop_at.value is {goal.value:g}, but data.val_files is empty, so {goal.metric} is never "
                "measured; add at least one file, or leave trainer.stop_at.value empty"
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
        # The resumed run may have another goal with another metric.
        if kept.get("metric") == self.task.trainer.stop_at.metric and kept["highest"] is not None:
            self._highest = float(kept["highest"])
