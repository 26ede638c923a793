"""A trainer made of stages: how it is built, set up, saved and resumed; the loop itself is in ``loop``."""

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
    """A trainer whose step is a list of stages, before its loop.

    Attributes:
        task: config sections, run directory, data and runtime of the run.
        run: workers, sampling, scoring and metrics that the stages share.
        places, stages: the stages of a step by name, with the reason for each, and the stages themselves.
        step, total_steps: training steps that are done, and those of the run; the latter known after :meth:`setup`.
        goal: the validation that ends the run early (``trainer.stop_at``).
        best_accuracy: the highest ``val/accuracy`` so far, ``-inf`` before any.
        metrics, latest: metrics of the last step, and the last value of each metric of the run.
        batches, val_batches: training and validation prompts; set by :meth:`setup`.
        saver: writes the checkpoints; set by :meth:`setup`.
        record: rollouts that this run writes or trains on.
        records: True if it writes them.
        recovery: the loss of processes that this trainer goes on after; None for the first trainer of a run.

    Args:
        task: the run, not yet entered; a config that cannot work is refused here.

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
        built = self.build_stages()
        self.places: Sequence[Place] = [place for place, _ in built]
        self.stages: list[Stage] = [stage for _, stage in built]
        if self.records and not any(place.spec.is_recorded for place in self.places):
            raise ConfigError(
                f"runtime.record_trajectories records rollouts, and trainer={task.trainer.name} makes none; leave the "
                "key out"
            )
        self.run.use(self.places)
        self.run.resample = lambda stage: self.run_stages(self.draw_prompts(), stage)

    @property
    def run_name(self) -> str:
        """The run directory's name."""
        return self.task.run_dir.name

    @abstractmethod
    def build_stages(self) -> list[tuple[Place, Stage]]:
        """Return the stages of a step in their order; nothing has been started."""

    @abstractmethod
    def run_stages(self, batch: DataProto, before: Stage | None = None) -> DataProto:
        """Return the batch after all stages; or as it is before one that asks for further rows, without metrics."""

    def load_val_batches(self) -> list[DataProto]:
        """Return the validation prompts, collated."""
        return self.task.val_batches(self.task.data.dataset)

    def should_stop(self) -> bool:
        """True to end before ``total_steps``; asked before each step."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the trainer beside its stages, as JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""

    def setup(self) -> None:
        """Read the data, start the workers, and go back to the last checkpoint if there is one."""
        task, run = self.task, self.run
        self.batches = task.train_batches()
        run.prompts = Prompts(self.batches)
        self.total_steps = run.total_steps = task.trainer.steps(self.batches.batches_per_epoch)
        if task.replay_of is None:
            self.goal.check_files(task.data.val_files)
            run.scorer = task.scorer()
            self.val_batches = self.load_val_batches()
        else:
            self.val_batches = []  # a validation generates
            self.record.check_steps(task.start_step + 1, self.total_steps)
        check_timeline(task.run_dir, task.start_step)
        task.start()
        if self.records:
            self.record.begin(fingerprints(task), task.start_step)
        elif task.replay_of is not None:
            self.record.check_parts(fingerprints(task), task.model.path)
        run.start(self.stages)
        trained = [group for role, group in run.groups.items() if role_trains(role)]
        self.saver = CheckpointSaver(task.checkpoints, trained, task.trainer.async_save, self._announce)
        if task.start_step:
            self._resume(task.start_step)

    def sync_weights(self) -> dict[str, float]:
        """Send the actor's weights to the rollout, as the version of the present step."""
        with self.run.timeline.replicas_busy("update_weights"):
            metrics = self.run.sampler.sync(self.step)
        for tell in self.run.on_synced:
            tell(self.step)
        return metrics

    def draw_prompts(self) -> DataProto:
        """Return the prompts of a step; no rows where the rollout stage draws them itself, ahead of the steps."""
        drawn_elsewhere = self.run.max_staleness or self.task.replay_of is not None
        return DataProto.from_dict({}) if drawn_elsewhere else self.run.prompts.draw()

    def validate(self) -> dict[str, float]:
        """Generate and score the validation prompts."""
        metrics = validate(self.run, self.val_batches, self.step)
        self.best_accuracy = max(self.best_accuracy, metrics["val/accuracy"])
        self.goal.see(metrics)
        return metrics

    def export(self) -> None:
        """Write the actor as a Hugging Face folder, complete or not at all; raises CheckpointError."""
        with replacing_folder(self.task.run_dir / "export") as folder:
            self.run.actor.group.export(str(folder.resolve()))

    def save_checkpoint(self) -> None:
        """Write ``checkpoints/step_N``, complete or not at all; raises CheckpointError. Earlier ones stay whole."""
        kept = {place.name: stage.state_dict() for place, stage in zip(self.places, self.stages, strict=True)}
        state: dict[str, Any] = {
            "step": self.step,
            "data": self.batches.state_dict(),
            "best_accuracy": self.best_accuracy if self.best_accuracy > float("-inf") else None,
            "accuracy": self.metrics.get("val/accuracy"),
            "stop_at": self.goal.state_dict(),
            "trainer": self.state_dict(),
            "stages": {name: each for name, each in kept.items() if each},
        }
        self.saver.save(self.step, state)

    def _announce(self, step: int, path: Path) -> None:
        self.run.emit("on_checkpoint_saved", step=step, path=str(path))

    def _resume(self, step: int) -> None:
        state = self.task.checkpoints.load_state(step)
        self.batches.load_state_dict(state["data"])
        if state["best_accuracy"] is not None:
            self.best_accuracy = float(state["best_accuracy"])
        kept = state.get("stages", {})
        for place, stage in zip(self.places, self.stages, strict=True):
            if place.name in kept:
                with _naming_state(step, f"stages.{place.name}"):
                    stage.load_state_dict(kept[place.name])
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
    """Errors from a state of the wrong shape name the checkpoint and the key in its ``trainer.json``."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"trainer.json of checkpoint step_{step}: {key} is not what was saved: {reason}"
        ) from error
