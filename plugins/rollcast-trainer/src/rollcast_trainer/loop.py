"""The loop of every trainer of this package: stages, validation, checkpoints and hooks."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rollcast.contracts.marks import mark
from rollcast.contracts.trainer import RunResult
from rollcast.protocol import DataProto
from rollcast_trainer.run.checkpoint_saver import CheckpointSaver
from rollcast_trainer.run.goal import Goal
from rollcast_trainer.run.groups import build_runtime
from rollcast_trainer.run.recovery import Recoveries, Recovery
from rollcast_trainer.run.replay import recorded_columns
from rollcast_trainer.run.resume import export_model, read_state, resume, trained_groups
from rollcast_trainer.run.run import Run
from rollcast_trainer.run.settings import StagedTrainer, check_run
from rollcast_trainer.run.timeline import TimelineWriter
from rollcast_trainer.run.validation import validate
from rollcast_trainer.workers.heap import frozen_heap

__all__ = ["LoopTrainer"]

logger = logging.getLogger(__name__)


class LoopTrainer(StagedTrainer):
    """A trainer whose step is a list of stages; subclasses choose the stages.

    Attributes:
        run: resources of the run, and what the stages share.
        goal: validation that ends the run early (``trainer.stop_at``).
        best_accuracy: highest ``val/accuracy`` so far, ``-inf`` before any.
        metrics, latest: metrics of the last step, and the last value of each metric of the run.
        saver: writer of the checkpoints; set by :meth:`setup`.
        recovery: the recovery that this trainer continues after; None for the first trainer of a run.

    Args:
        run: the run, not yet started.
    """

    saver: CheckpointSaver
    #: Timeline file of the run; None outside :meth:`fit`.
    _timeline: TimelineWriter | None = None

    def __init__(self, run: Run) -> None:
        self.run, run.trainer = run, self
        self.goal = Goal(run.settings.trainer.stop_at)
        self.best_accuracy = float("-inf")
        self.metrics: dict[str, float] = {}
        self.latest: dict[str, float] = {}
        self.recovery: Recovery | None = None
        #: Metrics of the recovery that the next step reports.
        self._recovered: dict[str, float] = {}

    @property
    def run_name(self) -> str:
        """Name of the run directory."""
        return self.run.settings.run_dir.name

    @property
    def step(self) -> int:
        """Number of completed training steps."""
        return self.run.completed

    @property
    def total_steps(self) -> int:
        """Training steps of the run; known after :meth:`setup`."""
        return self.run.total_steps

    def should_stop(self) -> bool:
        """Return True to end before ``total_steps``; called before each step."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the trainer's state for a checkpoint, besides that of its stages, as JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""

    # -- from start to end --------------------------------------------------------------------

    @classmethod
    def launch(cls, config: DictConfig) -> RunResult:
        run = Run(check_run(config, cls))
        settings = run.settings
        if settings.trainer.on_driver:
            return cls._drive(run)
        with build_runtime(settings) as runtime:
            result: RunResult = runtime.run_driver(_drive, cls, settings.plain)
            return result

    @classmethod
    def _drive(cls, run: Run) -> RunResult:
        """Run to the end; after a loss of processes, go on with a new trainer from the last checkpoint."""
        with run:
            trainer, recoveries = cls(run), Recoveries(run)
            while True:
                try:
                    return trainer.fit()
                except Exception as error:
                    if not recoveries.accept(error):
                        raise
                # Outside the handler, so that the error's traceback keeps no batch of the failed trainer alive.
                recovery = recoveries.begin(trainer.step)
                trainer = cls(run)
                trainer.recovery = recovery

    def setup(self) -> None:
        """Read the data, start the workers, and resume from the last checkpoint if there is one."""
        run, settings = self.run, self.run.settings
        run.start()
        self.saver = CheckpointSaver(
            run.checkpoints, trained_groups(run), settings.trainer.async_save, self._announce, run.remote
        )
        if run.start_step:
            resume(self, run.start_step)

    def _announce(self, step: int, path: str) -> None:
        self.run.hook.on_checkpoint_saved(trainer=self, step=step, path=path)

    def fit(self) -> RunResult:
        """Set up and run all remaining steps. Call it once, inside the run's context."""
        self.setup()
        error: BaseException | None = None
        self.run.hook.on_fit_start(trainer=self)
        if self.recovery is not None:
            self.run.hook.on_recovery(trainer=self, step=self.step, message=self.recovery.describe())
            self._recovered = self.recovery.metrics()
        try:
            with frozen_heap(), closing(TimelineWriter(self.run.settings.run_dir, self.step)) as self._timeline:
                self._fit()
        except BaseException as raised:
            error = raised
            if isinstance(raised, Exception):
                self.saver.rescue()
            self.run.hook.on_exception(trainer=self, error=raised)
            raise
        finally:
            self.run.hook.on_fit_end(trainer=self, error=error)
        return RunResult(self.step, self.run.settings.run_dir, dict(self.latest))

    def _fit(self) -> None:
        run, settings = self.run, self.run.settings.trainer
        if self._is_complete():
            logger.info("%s is complete at step %d of %d", run.settings.run_dir, self.step, self.total_steps)
        with mark("update_weights"), run.timeline.stage("update_weights"):
            run.sync_weights()
        if self.step == 0 and settings.val_before_train and run.val_prompts:
            with mark("validate"), run.timeline.stage("validate"):
                metrics = self.validate()
            self._report(metrics)
        while not self._is_complete():
            self.saver.settle()
            with mark(f"step {self.step + 1}"):
                self.train_step()
        if self.step < self.total_steps and self.goal.reason:
            logger.info("stopped at step %d of %d: %s", self.step, self.total_steps, self.goal.reason)
        self.saver.settle(wait=True)
        exported = export_model(run) if settings.export else None
        if run.remote is not None:
            run.remote.close(exported)

    def _is_complete(self) -> bool:
        return self.step >= self.total_steps or bool(self.goal.reason) or self.should_stop()

    def train_step(self) -> None:
        """Run one training step with its weight sync, and validation and checkpoint if they are due."""
        run, step = self.run, self.run.step
        run.hook.on_step_start(trainer=self, step=step)
        start = time.perf_counter()
        run.seeds.begin(f"step {step}")
        self.run_stages(run.draw_prompts())
        run.completed = step
        with run.recorder.phase("update_weights"):
            run.record(run.sync_weights())
        seconds = time.perf_counter() - start
        run.record({"time/step_s": seconds, **run.meter.metrics(seconds), **self._recovered})
        self._recovered = {}
        if run.val_prompts and self._is_due(run.settings.trainer.test_freq):
            with run.recorder.phase("validate"):
                run.record(self.validate())
        self._report(run.recorder.take())
        # After the metrics are written, so that they are complete up to any checkpoint.
        if self._is_due(run.settings.trainer.save_freq):
            with mark("save_checkpoint"), run.timeline.stage("save_checkpoint"):
                self.save_checkpoint()
        run.hook.on_step_end(trainer=self, step=step, metrics=self.metrics)

    def run_stages(self, batch: DataProto) -> DataProto:
        """Return the batch after all stages."""
        run, places = self.run, self.run.settings.places
        recorded = [place for place in places if place.spec.is_recorded] if run.settings.records_rollouts else []
        for place, stage in zip(places, run.stages, strict=True):
            batch = run.run_stage(place, stage, batch)
            if recorded and place is recorded[-1]:
                with run.recorder.phase("record_trajectories"):
                    rollouts = batch.select(recorded_columns(batch, places))
                    run.rollout_record.write(run.step, rollouts, run.recorder.compute())
        run.join_updates()
        return batch

    def validate(self) -> dict[str, float]:
        """Generate and score the validation prompts, and return the metrics."""
        metrics = validate(self.run, self.run.val_prompts)
        self.best_accuracy = max(self.best_accuracy, metrics["val/accuracy"])
        self.goal.see(metrics)
        return metrics

    def save_checkpoint(self) -> None:
        """Write ``checkpoints/step_N``, atomically; raises CheckpointError, with earlier checkpoints intact."""
        self.saver.save(self.step, read_state(self))

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
        self.run.hook.on_metrics(trainer=self, step=self.step, metrics=self.metrics)


def _drive(trainer: type[LoopTrainer], config: Mapping[str, Any]) -> RunResult:
    """Run a trainer in this process, which is a worker process of the cluster."""
    return trainer._drive(Run(check_run(OmegaConf.create(dict(config)), trainer)))
