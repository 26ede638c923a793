"""Trainer ``sft``: supervised fine-tuning on prompts and responses, validated by generation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

import torch

from rollcast.contracts.stage import StageSpec
from rollcast.protocol import DataProto, Jagged
from rollcast_algorithms.losses import SftLoss
from rollcast_trainer.batch.balance import row_lengths
from rollcast_trainer.batch.columns import MODEL, model_columns
from rollcast_trainer.loop import LoopTrainer
from rollcast_trainer.run.data import val_batches
from rollcast_trainer.run.settings import RunSettings
from rollcast_trainer.run.setups import ModelNeeds, TrainingStage
from rollcast_trainer.run.supply import Place
from rollcast_trainer.schemas import SftConfig
from rollcast_trainer.workers.actor import ActorRolloutRefWorker
from rollcast_trainer.workers.roles import Role

__all__ = ["SftTrainer", "UpdateSupervised"]


class UpdateSupervised(TrainingStage):
    """Stage that takes one optimizer step on the batch's responses."""

    phase: ClassVar[str] = "update_actor"
    spec: ClassVar[StageSpec] = StageSpec(reads=MODEL, roles=(Role.ACTOR_ROLLOUT,))

    def needs(self) -> Sequence[ModelNeeds]:
        # The rollout's temperature must not scale the logits of a supervised loss.
        return [ModelNeeds(Role.ACTOR_ROLLOUT, loss_function=SftLoss(), temperature=1.0)]

    def __call__(self, batch: DataProto) -> DataProto:
        rows, start = batch.select(model_columns(batch)), time.perf_counter()
        self.run.meter.count_tokens(sum(row_lengths(rows)))
        whole = [torch.arange(len(rows))]
        metrics = self.run.actor.update(ActorRolloutRefWorker.update_actor, rows, whole).get()
        tokens = float(Jagged.of(rows["response_mask"]).values.sum())
        self.run.record({key.replace("actor/", "sft/"): value for key, value in metrics.items()})
        rate = tokens / max(time.perf_counter() - start, 1e-9)
        self.run.record({"sft/tokens": tokens, "sft/tokens_per_s": rate})
        return batch


class SftTrainer(LoopTrainer):
    """A trainer with one optimizer step per batch."""

    schema = SftConfig

    @classmethod
    def list_stages(cls, settings: RunSettings) -> list[Place]:  # noqa: ARG003  # the same for every run
        return [Place("update_supervised", UpdateSupervised.spec, "goal of the trainer", UpdateSupervised)]

    @classmethod
    def val_batches(cls, settings: RunSettings) -> list[DataProto]:
        """Return the prompts of supervised rows; each generated response is compared with the row's own response."""
        return val_batches(settings, "prompts", ground_truth_key=settings.data.response_key)
