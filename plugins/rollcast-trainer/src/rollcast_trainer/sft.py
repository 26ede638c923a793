"""Trainer ``sft``: supervised fine-tuning on prompts and responses, validated by generation."""

from __future__ import annotations

from dataclasses import replace

import torch

from rollcast import WorkerGroup
from rollcast.contracts.worker import ClassWithInitArgs
from rollcast.protocol import DataProto
from rollcast_algorithms.losses import SftLoss
from rollcast_trainer.loop import LoopTrainer, Timer
from rollcast_trainer.roles import Role
from rollcast_trainer.schemas import SftTrainerConfig
from rollcast_trainer.workers import ActorRolloutRefWorker

__all__ = ["SftTrainer"]

_COLUMNS = ["input_ids", "attention_mask", "position_ids", "responses", "response_mask"]


class SftTrainer(LoopTrainer):
    """One optimizer step a batch; may stop at an accuracy on the validation files."""

    schema = SftTrainerConfig

    def start_workers(self) -> dict[Role, WorkerGroup]:
        # A rollout's temperature has no part in a supervised loss.
        settings = replace(self.forward_settings(), temperature=1.0)
        setup = self.task.worker_setup(loss_function=SftLoss(), has_reference=False, forward=settings, infer=settings)
        return self.task.start_roles({Role.ACTOR_ROLLOUT: ClassWithInitArgs(ActorRolloutRefWorker, setup)})

    def load_val_batches(self) -> list[DataProto]:
        """The prompts of supervised rows; a generated response is compared with the row's own."""
        return self.task.val_batches("prompts", ground_truth_key=self.task.data.response_key)

    def should_stop(self) -> bool:
        goal = self.task.trainer.stop_at_accuracy
        return goal is not None and self.best_accuracy >= goal

    def train_step(self, batch: DataProto, timer: Timer) -> dict[str, float]:
        rows = batch.select(_COLUMNS)
        with timer.phase("update_actor"):
            metrics = self.update(Role.ACTOR_ROLLOUT, "update_actor", rows, [torch.arange(len(rows))])
        tokens = float(rows["response_mask"].sum())
        renamed = {key.replace("actor/", "sft/"): value for key, value in metrics.items()}
        return {**renamed, "sft/tokens": tokens, "sft/tokens_per_s": tokens / max(timer.seconds["update_actor"], 1e-9)}
