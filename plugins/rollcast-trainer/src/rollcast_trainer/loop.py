"""The loop of every trainer of this package: stages, validation, checkpoints and hooks."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any, Self

from omegaconf import DictConfig, OmegaConf

from rollcast import Composed
from rollcast.contracts.marks import mark
from rollcast.contracts.stage import Stage
from rollcast.contracts.trainer import RunResult, trainers
from rollcast.errors import ConfigError
from rollcast.protocol import DataProto
from rollcast_trainer.run.recovery import Recoveries
from rollcast_trainer.run.replay import recorded_columns
from rollcast_trainer.run.staged_trainer import StagedTrainer
from rollcast_trainer.run.task_runner import TaskRunner
from rollcast_trainer.run.timeline import TimelineWriter
from rollcast_trainer.workers.heap import frozen_heap

__all__ = ["LoopTrainer", "build_from_config", "build_loop_trainer"]

logger = logging.getLogger(__name__)


class LoopTrainer(StagedTrainer):
    """A trainer whose step is a list of stages; subclasses choose the stages."""

    #: Timeline file of the run; None outside :meth:`fit`.
    _timeline: TimelineWriter | None = None

    @classmethod
    def launch(cls, config: DictConfig) -> RunResult:
        task = TaskRunner(config, cls.schema)
        trainer = cls(task)
        if not task.trainer.on_driver:
            return task.run_on_cluster(_drive, cls, task.plain)
        return cls._drive(task, trainer)

    @classmethod
    def _drive(cls, task: TaskRunner, trainer: Self) -> RunResult:
        """Run to the end; after a loss of processes, go on with a new trainer from the last checkpoint."""
        with task:
            recoveries = Recoveries(task)
            while True:
                try:
                    return trainer.fit()
                except Exception as error:
                    if not recoveries.accept(error):
                        raise
                # Outside the handler, so that the error's traceback keeps no batch of the failed trainer alive.
                recovery = recoveries.begin(trainer.step)
                trainer = cls(task)
                trainer.recovery = recovery

    def fit(self) -> RunResult:
        """Set up and run all remaining steps. Call it once, inside the task's context."""
        self.setup()
        error: BaseException | None = None
        self.run.emit("on_fit_start")
        if self.recovery is not None:
            self.run.emit("on_recovery", step=self.step, message=self.recovery.describe())
            self.run.record(self.recovery.metrics())
        try:
            with frozen_heap(), closing(TimelineWriter(self.task.run_dir, self.step)) as self._timeline:
                self._fit()
        except BaseException as raised:
            error = raised
            if isinstance(raised, Exception):
                self.saver.rescue()
            self.run.emit("on_exception", error=raised)
            raise
        finally:
            self.run.emit("on_fit_end", error=error)
        return RunResult(self.step, self.task.run_dir, dict(self.latest))

    def _fit(self) -> None:
        if self._is_complete():
            logger.info("%s is complete at step %d of %d", self.task.run_dir, self.step, self.total_steps)
        timeline = self.run.timeline
        with mark("update_weights"), timeline.stage("update_weights"):
            self.sync_weights()
        if self.step == 0 and self.task.trainer.val_before_train and self.val_batches:
            with mark("validate"), timeline.stage("validate"):
                metrics = self.validate()
            self._report(metrics)
        while not self._is_complete():
            self.saver.settle()
            with mark(f"step {self.step + 1}"):
                self.train_step()
        if self.step < self.total_steps and self.goal.reason:
            logger.info("stopped at step %d of %d: %s", self.step, self.total_steps, self.goal.reason)
        self.saver.settle(wait=True)
        if self.task.trainer.export:
            self.export()
        if self.task.remote is not None:
            self.task.remote.close(self.task.run_dir / "export" if self.task.trainer.export else None)

    def _is_complete(self) -> bool:
        return self.step >= self.total_steps or bool(self.goal.reason) or self.should_stop()

    def train_step(self) -> None:
        """Run one training step with its weight sync, and validation and checkpoint if they are due."""
        step, run = self.step + 1, self.run
        run.emit("on_step_start", step=step)
        start = time.perf_counter()
        run.seeds.begin(f"step {step}")
        self.run_stages(self.draw_prompts())
        self.step = step
        with run.recorder.phase("update_weights"):
            run.record(self.sync_weights())
        seconds = time.perf_counter() - start
        run.record({"time/step_s": seconds, **run.meter.metrics(seconds)})
        if self.val_batches and self._is_due(self.task.trainer.test_freq):
            with run.recorder.phase("validate"):
                run.record(self.validate())
        self._report(run.recorder.take())
        # After the metrics are written, so that they are complete up to any checkpoint.
        if self._is_due(self.task.trainer.save_freq):
            with mark("save_checkpoint"), run.timeline.stage("save_checkpoint"):
                self.save_checkpoint()
        run.emit("on_step_end", step=step, metrics=self.metrics)

    def run_stages(self, batch: DataProto, before: Stage | None = None) -> DataProto:
        """Return the batch after all stages.

        With ``before``, stop in front of that stage and record no metrics: a stage calls this to get more rows.
        """
        recorder = self.run.recorder
        metrics: dict[str, float] = {}
        last = max((n for n, place in enumerate(self.places) if place.spec.is_recorded), default=-1)
        for number, (place, stage) in enumerate(zip(self.places, self.stages, strict=True)):
            if stage is before:
                break
            collected = metrics if self.records and before is None and place.spec.is_recorded else None
            with (
                recorder.phase(stage.phase or place.name),
                recorder.muted(before is not None),
                recorder.collecting(collected),
            ):
                batch = stage(batch)
            if collected is not None and number == last:
                with recorder.phase("record_trajectories"):
                    self.record.write(self.run.step, batch.select(recorded_columns(batch, self.places)), metrics)
        if before is None:
            self.run.join_updates()
        return batch

    def _is_due(self, every: int) -> bool:
        return every > 0 and (self.step % every == 0 or self._is_complete())

    def _report(self, metrics: Mapping[str, float]) -> None:
        self.metrics = {"step": float(self.step), **{key: float(value) for key, value in metrics.items()}}
        self.latest |= self.metrics
        for name, share in self.metrics.items():
            if name.endswith("/skipped_steps") and share > 0:
                logger.warning(
                    "step %d: %s is %g: these optimizer steps were skipped, because the loss or its gradient was not "
                    "finite; the workers' warnings name the columns",
                    self.step,
                    name,
                    share,
                )
        # Before the trackers run: the report that one of them writes shows this step too.
        line = self.run.timeline.take()
        if self._timeline is not None:
            self._timeline.append(self.step, line)
        self.run.emit("on_metrics", step=self.step, metrics=self.metrics)


def _drive(trainer: type[LoopTrainer], config: Mapping[str, Any]) -> RunResult:
    """Run a trainer in this process, which is a worker process of the cluster."""
    task = TaskRunner(OmegaConf.create(dict(config)), trainer.schema)
    return trainer._drive(task, trainer(task))


def build_loop_trainer(composed: Composed) -> LoopTrainer:
    """Load the plugins of a config and return its trainer, built but not started.

    Raises:
        ConfigError: ``trainer.name`` names a trainer that is no :class:`LoopTrainer`.
    """
    composed.load_plugins()
    return build_from_config(composed.config)


def build_from_config(config: DictConfig) -> LoopTrainer:
    """Return the trainer of a resolved config, such as a run's ``config.yaml``, built but not started.

    Remote models are copied to this node.

    Raises:
        ConfigError: ``trainer.name`` names a trainer that is no :class:`LoopTrainer`.
    """
    name = config.trainer.name
    trainer_class = trainers.get(name)
    if not issubclass(trainer_class, LoopTrainer):
        raise ConfigError(
            f"trainer.name={name} is not a trainer of rollcast-trainer, so its stages are unknown before it "
            "runs; choose one that is, such as ppo"
        )
    return trainer_class(TaskRunner(config, trainer_class.schema))
