"""The loop that every trainer of this package shares: steps, validation, checkpoints, hooks."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from rollcast.contracts.engine import ForwardSettings
from rollcast.contracts.rollout import SamplingParams
from rollcast.contracts.trainer import BaseTrainer, RunResult
from rollcast.controller.worker_group import WorkerGroup
from rollcast.protocol import DataProto
from rollcast_trainer.rewarding import Scored
from rollcast_trainer.schemas import TrainerConfig
from rollcast_trainer.task_runner import TaskRunner, plain_metrics, total_steps

__all__ = ["LoopTrainer", "Timer"]

logger = logging.getLogger(__name__)
_PROMPT_COLUMNS = ["input_ids", "attention_mask", "position_ids"]


class Timer:
    """Wall time of a step's phases, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block as ``time/<name>_s``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """``time/<phase>_s`` of every phase."""
        return {f"time/{name}_s": value for name, value in self.seconds.items()}


class LoopTrainer(BaseTrainer):
    """A trainer of one actor group: subclasses say what a step does.

    Args:
        task: the run that it works in, entered.
    """

    schema: type[TrainerConfig] = TrainerConfig

    def __init__(self, task: TaskRunner) -> None:
        self.task = task
        self.step = task.start_step
        self.best_accuracy = float("-inf")
        self.batches = task.train_batches()
        self.total_steps = total_steps(task.trainer, self.batches.batches_per_epoch)
        if task.actor.optim.total_training_steps < 1:
            task.actor.optim.total_training_steps = self.total_steps
        self.scorer = task.scorer()
        self.val_batches = task.val_batches(**self.val_changes())
        self.metrics: dict[str, float] = {}
        self.group: WorkerGroup = self.start_workers()
        if task.start_step:
            self._resume()

    @classmethod
    def launch(cls, config: DictConfig) -> RunResult:
        with TaskRunner(config, cls.schema) as task:
            return cls(task).fit()

    @property
    def run_name(self) -> str:
        """The run directory's name."""
        return self.task.run_dir.name

    # -- what a subclass decides --------------------------------------------------------------

    @abstractmethod
    def start_workers(self) -> WorkerGroup:
        """Start the actor's group."""

    @abstractmethod
    def train_step(self, batch: DataProto, timer: Timer) -> dict[str, float]:
        """One training step; returns its metrics."""

    def val_changes(self) -> dict[str, Any]:
        """Keys of the data config that differ for validation prompts."""
        return {}

    def should_stop(self) -> bool:
        """Whether to end before ``total_steps``, asked after each validation."""
        return False

    # -- the loop -----------------------------------------------------------------------------

    def fit(self) -> RunResult:
        """Run all steps that are left."""
        error: BaseException | None = None
        self.task.emit("on_fit_start", trainer=self)
        try:
            self._run()
        except BaseException as raised:
            error = raised
            self.task.emit("on_exception", trainer=self, error=raised)
            raise
        finally:
            self.task.emit("on_fit_end", trainer=self, error=error)
        return RunResult(self.step, self.task.run_dir, dict(self.metrics))

    def _run(self) -> None:
        if self.step >= self.total_steps:
            logger.info("%s is complete at step %d of %d", self.task.run_dir, self.step, self.total_steps)
        self.group.update_weights(self.step)
        if self.step == 0 and self.task.trainer.val_before_train and self.val_batches:
            self._report(self.validate())
            if self.should_stop():
                self.total_steps = 0
        while self.step < self.total_steps:
            self._one_step()
            if self.should_stop():
                break
        if self.task.trainer.export:
            self.group.export(str(self.task.run_dir / "export"))

    def _one_step(self) -> None:
        step = self.step + 1
        self.task.emit("on_step_start", trainer=self, step=step)
        timer, start = Timer(), time.perf_counter()
        metrics = self.train_step(next(self.batches), timer)
        self.step = step
        with timer.phase("update_weights"):
            metrics |= self.sync_weights()
        metrics["time/step_s"] = time.perf_counter() - start
        last = step == self.total_steps
        if self.val_batches and self._due(self.task.trainer.test_freq, last):
            with timer.phase("validate"):
                metrics |= self.validate()
        metrics |= timer.metrics()
        self._report(metrics)
        self.task.emit("on_step_end", trainer=self, step=step, metrics=self.metrics)
        if self._due(self.task.trainer.save_freq, last or self.should_stop()):
            self.save_checkpoint()

    def _due(self, every: int, last: bool) -> bool:
        return every > 0 and (last or self.step % every == 0)

    def _report(self, metrics: dict[str, float]) -> None:
        self.metrics = {"step": float(self.step), **plain_metrics(metrics)}
        self.task.emit("on_metrics", trainer=self, step=self.step, metrics=self.metrics)

    # -- named steps --------------------------------------------------------------------------

    def sync_weights(self) -> dict[str, float]:
        """Hand the actor's weights to the rollout."""
        reports = self.group.update_weights(self.step)
        return dict(reports[0])

    def sampling(self, validation: bool = False) -> SamplingParams:
        """How responses are sampled, for training or for validation."""
        rollout = self.task.rollout
        chosen = rollout.val_kwargs if validation else rollout
        return SamplingParams(
            temperature=chosen.temperature,
            top_p=chosen.top_p,
            top_k=chosen.top_k,
            max_tokens=self.task.data.max_response_length,
        )

    def generate(self, prompts: DataProto, sampling: SamplingParams) -> DataProto:
        """Responses for the prompts, joined with the prompts' own columns and cut to the longest."""
        output = self.group.generate_sequences(prompts.select(_PROMPT_COLUMNS), sampling)
        return prompts.drop(_PROMPT_COLUMNS).union(trim_responses(output))

    def validate(self) -> dict[str, float]:
        """Generate and score the validation prompts."""
        sampling, repeats = self.sampling(validation=True), self.task.rollout.val_kwargs.n
        scored: list[Scored] = []
        for batch in self.val_batches:
            prompts = batch.repeat(repeats, interleave=True) if repeats > 1 else batch
            scored.append(self.scorer.score(self.generate(prompts, sampling)))
        rows = [row for part in scored for row in part.as_rows()]
        metrics = _accuracies(rows)
        self.best_accuracy = max(self.best_accuracy, metrics["val/accuracy"])
        self.metrics = {**self.metrics, **metrics}
        self.task.emit("on_validation_end", trainer=self, step=self.step, metrics=metrics, samples=rows)
        return metrics

    def save_checkpoint(self) -> None:
        """Write ``checkpoints/step_N``, complete or not at all."""
        state = {"step": self.step, "data": self.batches.state_dict(), "best_accuracy": _json_float(self.best_accuracy)}
        with self.task.checkpoints.writing(self.step, state) as folder:
            self.group.save_checkpoint(str(folder.resolve()))
        path = self.task.checkpoints.path(self.step)
        self.task.emit("on_checkpoint_saved", trainer=self, step=self.step, path=str(path))

    def _resume(self) -> None:
        state = self.task.checkpoints.load_state(self.step)
        self.batches.load_state_dict(state["data"])
        best = state.get("best_accuracy")
        self.best_accuracy = float("-inf") if best is None else float(best)
        self.group.load_checkpoint(str(self.task.checkpoints.path(self.step).resolve()))
        logger.info("resumed from %s", self.task.checkpoints.path(self.step))

    def forward_settings(self) -> tuple[ForwardSettings, ForwardSettings]:
        """How the actor runs batches: in updates, and when it only computes log-probs."""
        actor = self.task.actor
        train = ForwardSettings(
            temperature=self.task.rollout.temperature or 1.0,
            calculate_entropy=actor.entropy_coeff != 0,
            micro_batch_size_per_gpu=actor.ppo_micro_batch_size_per_gpu,
            max_token_len_per_gpu=actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else None,
            max_response_length=self.task.data.max_response_length,
        )
        rows = actor.log_prob_micro_batch_size_per_gpu or actor.ppo_micro_batch_size_per_gpu
        return train, replace(train, calculate_entropy=True, micro_batch_size_per_gpu=rows)


def _accuracies(rows: list[dict[str, Any]]) -> dict[str, float]:
    def mean(chosen: list[dict[str, Any]], key: str) -> float:
        return sum(float(row[key]) for row in chosen) / max(len(chosen), 1)

    metrics = {
        "val/accuracy": mean(rows, "correct"),
        "val/reward": mean(rows, "score"),
        "val/samples": float(len(rows)),
    }
    sources = sorted({row["data_source"] for row in rows})
    if len(sources) > 1:
        for source in sources:
            metrics[f"val/accuracy/{source}"] = mean([row for row in rows if row["data_source"] == source], "correct")
    return metrics


def _json_float(value: float) -> float | None:
    return None if value in (float("inf"), float("-inf")) else value


def trim_responses(batch: DataProto) -> DataProto:
    """Cut the response columns to the longest response of the batch (at least one column)."""
    mask = batch["response_mask"]
    width = mask.shape[1]
    longest = max(int(mask.sum(-1).max()) if len(batch) else 1, 1)
    if longest == width:
        return batch
    cut = {
        name: batch[name][:, : batch[name].shape[1] - (width - longest)].contiguous()
        for name in ("responses", "response_mask", "rollout_log_probs", "input_ids", "attention_mask", "position_ids")
    }
    return batch.with_columns(cut)
