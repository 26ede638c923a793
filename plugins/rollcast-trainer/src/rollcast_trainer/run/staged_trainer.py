"""Base of the trainers made of stages: construction, setup, saving and resuming. The loop itself is in ``loop``."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from rollcast.contracts.stage import Stage
from rollcast.contracts.trainer import BaseTrainer
from rollcast.errors import CheckpointError, ConfigError
from rollcast.protocol import DataProto
from rollcast_data.loader import EpochIterator
from rollcast_trainer.batch.sizes import ParallelSizes
from rollcast_trainer.run.checkpoint_saver import CheckpointSaver
from rollcast_trainer.run.goal import Goal
from rollcast_trainer.run.prompts import Prompts
from rollcast_trainer.run.recovery import Recovery
from rollcast_trainer.run.replay import RolloutRecord, fingerprints
from rollcast_trainer.run.run_dir import replacing_folder
from rollcast_trainer.run.supply import Place
from rollcast_trainer.run.task_runner import TaskRunner
from rollcast_trainer.run.timeline import check_timeline
from rollcast_trainer.run.training_run import TrainingRun
from rollcast_trainer.run.validation import validate
from rollcast_trainer.schemas import RunConfig
from rollcast_trainer.workers.roles import role_trains

__all__ = ["StagedTrainer"]

logger = logging.getLogger(__name__)


class StagedTrainer(BaseTrainer):
    """A trainer whose step is a list of stages, without its loop.

    Attributes:
        task: config sections, run directory, data and runtime of the run.
        run: workers, sampling, scoring and metrics that the stages share.
        places, stages: the stages of a step: name and reason of each, and the stage objects.
        step, total_steps: completed training steps, and steps of the whole run; the latter is known after
            :meth:`setup`.
        goal: validation that ends the run early (``trainer.stop_at``).
        best_accuracy: highest ``val/accuracy`` so far, ``-inf`` before any.
        metrics, latest: metrics of the last step, and the last value of each metric of the run.
        batches, val_batches: training and validation prompts; set by :meth:`setup`.
        saver: writer of the checkpoints; set by :meth:`setup`.
        record: rollouts that this run writes or trains on.
        records: True if the run writes rollouts.
        recovery: the recovery that this trainer continues after; None for the first trainer of a run.

    Args:
        task: the run, not yet entered.

    Raises:
        RollcastError: the config cannot work.
    """

    schema: ClassVar[type[RunConfig]] = RunConfig
    #: True if a subclass reads ``task.config.trainer_kwargs``.
    takes_kwargs: ClassVar[bool] = False

    batches: EpochIterator
    val_batches: list[DataProto]
    saver: CheckpointSaver

    def __init__(self, task: TaskRunner) -> None:
        self.task, self.step, self.total_steps = task, 0, 0
        self.recovery: Recovery | None = None
        self.best_accuracy = float("-inf")
        self.metrics: dict[str, float] = {}
        self.latest: dict[str, float] = {}
        free = task.config.get("trainer_kwargs")
        if free and not self.takes_kwargs:
            raise ConfigError(
                f"trainer_kwargs.{next(iter(free))} is set, but trainer={task.trainer.name} takes no free options; its "
                "keys are those of the section trainer"
            )
        task.trainer.check()
        self.goal = Goal(task.trainer.stop_at)
        longest = task.data.max_prompt_length + task.data.max_response_length
        task.actor.check(longest, ParallelSizes.read(task.engine).context)
        self.run = TrainingRun(task, self)
        self.record = RolloutRecord(task.replay_of or task.run_dir)
        self.records = task.replay_of is None and task.runtime_config.record_trajectories
        if task.replay_of is not None:
            self.record.check_config(task.plain)
        # Stages look at the models of their roles.
        task.copy_models()
        built = self.build_stages()
        self.places: Sequence[Place] = [place for place, _ in built]
        self.stages: list[Stage] = [stage for _, stage in built]
        if self.records and not any(place.spec.is_recorded for place in self.places):
            raise ConfigError(
                f"runtime.record_trajectories records rollouts, but trainer={task.trainer.name} makes none; remove the "
                "key"
            )
        self.run.use(self.places)
        self.run.resample = lambda stage: self.run_stages(self.draw_prompts(), stage)

    @property
    def run_name(self) -> str:
        """Name of the run directory."""
        return self.task.run_dir.name

    @abstractmethod
    def build_stages(self) -> list[tuple[Place, Stage]]:
        """Return the stages of a step in order, without starting anything."""

    @abstractmethod
    def run_stages(self, batch: DataProto, before: Stage | None = None) -> DataProto:
        """Return the batch after all stages.

        With ``before``, stop in front of that stage and record no metrics: a stage calls this to get more rows.
        """

    def load_val_batches(self) -> list[DataProto]:
        """Return the validation prompts, collated."""
        return self.task.val_batches(self.task.data.dataset)

    def should_stop(self) -> bool:
        """Return True to end before ``total_steps``; called before each step."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the trainer's state for a checkpoint, besides that of its stages, as JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""

    def setup(self) -> None:
        """Read the data, start the workers, and resume from the last checkpoint if there is one."""
        task, run = self.task, self.run
        self.batches = task.train_batches()
        run.prompts = Prompts(self.batches)
        self.total_steps = run.total_steps = task.trainer.steps(self.batches.batches_per_epoch)
        if task.replay_of is None:
            self.goal.check_files(task.data.val_files)
            run.scorer = task.scorer()
            run.scorer.follow(lambda: (self.step, self.total_steps))
            self.val_batches = self.load_val_batches()
        else:
            self.val_batches = []  # validation would need to generate
            self.record.check_steps(task.start_step + 1, self.total_steps)
        check_timeline(task.run_dir, task.start_step)
        task.start()
        if self.records:
            self.record.begin(fingerprints(task), task.start_step)
        elif task.replay_of is not None:
            self.record.check_parts(fingerprints(task), task.model.path)
        run.start(self.stages)
        trained = [group for role, group in run.groups.items() if role_trains(role)]
        self.saver = CheckpointSaver(task.checkpoints, trained, task.trainer.async_save, self._announce, task.remote)
        if task.start_step:
            self._resume(task.start_step)

    def sync_weights(self) -> dict[str, float]:
        """Send the actor's weights to the rollout, with the current step as their version."""
        with self.run.timeline.replicas_busy("update_weights"):
            metrics = self.run.sampler.sync(self.step)
        for tell in self.run.on_synced:
            tell(self.step)
        return metrics

    def draw_prompts(self) -> DataProto:
        """Return the prompts of a step; empty if the rollout stage draws its own prompts ahead of time, or in a
        replay.
        """
        drawn_elsewhere = self.run.max_staleness or self.task.replay_of is not None
        return DataProto.from_dict({}) if drawn_elsewhere else self.run.prompts.draw()

    def validate(self) -> dict[str, float]:
        """Generate and score the validation prompts, and return the metrics."""
        metrics = validate(self.run, self.val_batches, self.step)
        self.best_accuracy = max(self.best_accuracy, metrics["val/accuracy"])
        self.goal.see(metrics)
        return metrics

    def export(self) -> None:
        """Write the actor as a Hugging Face folder, atomically; raises CheckpointError if it cannot be written."""
        with replacing_folder(self.task.run_dir / "export") as folder:
            self.run.actor.group.export(str(folder.resolve()))

    def save_checkpoint(self) -> None:
        """Write ``checkpoints/step_N``, atomically; raises CheckpointError, with earlier checkpoints intact."""
        states = {place.name: stage.state_dict() for place, stage in zip(self.places, self.stages, strict=True)}
        state: dict[str, Any] = {
            "step": self.step,
            "data": self.batches.state_dict(),
            "best_accuracy": self.best_accuracy if self.best_accuracy > float("-inf") else None,
            "accuracy": self.metrics.get("val/accuracy"),
            "stop_at": self.goal.state_dict(),
            "trainer": self.state_dict(),
            "stages": {name: stage_state for name, stage_state in states.items() if stage_state},
        }
        self.saver.save(self.step, state)

    def _announce(self, step: int, path: Path) -> None:
        self.run.emit("on_checkpoint_saved", step=step, path=str(path))

    def _resume(self, step: int) -> None:
        state = self.task.checkpoints.load_state(step)
        self.batches.load_state_dict(state["data"])
        if state["best_accuracy"] is not None:
            self.best_accuracy = float(state["best_accuracy"])
        states = state.get("stages", {})
        for place, stage in zip(self.places, self.stages, strict=True):
            if place.name in states:
                with _naming_state(step, f"stages.{place.name}"):
                    stage.load_state_dict(states[place.name])
        with _naming_state(step, "stop_at"):
            self.goal.load_state_dict(state.get("stop_at", {}))
        with _naming_state(step, "trainer"):
            self.load_state_dict(state.get("trainer", {}))
        path = self.task.checkpoints.path(step)
        for role, group in self.run.groups.items():
            if role_trains(role):
                group.load_checkpoint(str(path.resolve()))
        self.step = step
        logger.info("resumed from %s", path)


@contextmanager
def _naming_state(step: int, key: str) -> Iterator[None]:
    """Re-raise an error from a state of the wrong shape with the checkpoint and the key in its ``trainer.json``."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"trainer.json of checkpoint step_{step}: {key} cannot be restored: {reason}") from error
