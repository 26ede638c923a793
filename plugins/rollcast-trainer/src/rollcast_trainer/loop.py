"""The loop that every trainer of this package shares: steps, validation, checkpoints, hooks."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from omegaconf import DictConfig

from rollcast import WorkerGroup
from rollcast.contracts.engine import ForwardSettings, OptimConfig
from rollcast.contracts.profiler import mark
from rollcast.contracts.rollout import SamplingParams
from rollcast.contracts.trainer import BaseTrainer, RunResult
from rollcast.protocol import DataProto
from rollcast_data.loader import EpochIterator
from rollcast_serving.generation import trim_responses
from rollcast_trainer.balancing import row_lengths, spread_rows
from rollcast_trainer.batching import plan_update
from rollcast_trainer.heap import frozen_heap
from rollcast_trainer.metering import Meter
from rollcast_trainer.parallel import ParallelSizes
from rollcast_trainer.rewarding import RewardScorer, Scored, summarize
from rollcast_trainer.roles import Role
from rollcast_trainer.run_dir import replacing_folder
from rollcast_trainer.sampling import Sampler
from rollcast_trainer.saving import CheckpointSaver
from rollcast_trainer.schemas import RunConfig
from rollcast_trainer.seeds import RowSeeds
from rollcast_trainer.task_runner import TaskRunner
from rollcast_trainer.validation import answer_extractor, pick_samples, summarize_samples

__all__ = ["LoopTrainer", "Timer"]

logger = logging.getLogger(__name__)
_PROMPT_COLUMNS = ["input_ids", "attention_mask", "position_ids"]


class Timer:
    """Wall time of a step's phases, in seconds; profilers show them by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block as ``time/<name>_s``."""
        start = time.perf_counter()
        try:
            with mark(name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """``time/<phase>_s`` of every phase."""
        return {f"time/{name}_s": value for name, value in self.seconds.items()}


class LoopTrainer(BaseTrainer):
    """A trainer of one actor group: subclasses say what a step does.

    Attributes:
        task: config sections, run directory, data and workers of the run.
        step: training steps that are done.
        total_steps: training steps of the run; known after :meth:`setup`.
        best_accuracy: the highest ``val/accuracy`` so far, ``-inf`` before any.
        metrics: of the last step.
        batches, val_batches, scorer: data and reward; set by :meth:`setup`.
        groups: the workers by role; ``group`` is the actor's. Set by :meth:`setup`.
        sampler: what generates with the actor's weights; set by :meth:`setup`.
        saver: what writes the checkpoints; set by :meth:`setup`.
        meter: counts what a step's passes cost; a hook may set another in ``on_fit_start``.

    Args:
        task: the run, not yet entered; what is wrong with its config is refused here.

    Raises:
        RollcastError: the config cannot work.
    """

    schema: ClassVar[type[RunConfig]] = RunConfig

    batches: EpochIterator
    val_batches: list[DataProto]
    scorer: RewardScorer
    groups: dict[Role, WorkerGroup]
    sampler: Sampler
    saver: CheckpointSaver
    meter: Meter
    group: WorkerGroup

    def __init__(self, task: TaskRunner) -> None:
        self.task = task
        self.step = 0
        self.total_steps = 0
        self.best_accuracy = float("-inf")
        self.metrics: dict[str, float] = {}
        self._latest: dict[str, float] = {}
        self.meter = Meter()
        self._seeds = RowSeeds(task.trainer.seed)
        longest = task.data.max_prompt_length + task.data.max_response_length
        task.actor.check(longest, ParallelSizes.read(task.engine).context)

    @classmethod
    def launch(cls, config: DictConfig) -> RunResult:
        task = TaskRunner(config, cls.schema)
        trainer = cls(task)
        with task:
            return trainer.fit()

    @property
    def run_name(self) -> str:
        """The run directory's name."""
        return self.task.run_dir.name

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks of the actor."""
        return self.ranks_of(Role.ACTOR_ROLLOUT)

    def ranks_of(self, role: Role) -> int:
        """Data-parallel ranks of the workers that play a role."""
        played_as = self._played_as(role)
        return max(place.dp_rank for place in self.groups[played_as].mesh(played_as.mesh)) + 1

    def _played_as(self, role: Role) -> Role:
        """The role itself if it has workers of its own; else the actor's, which play it too."""
        return role if role in self.groups else next(iter(self.groups))

    # -- what a subclass decides --------------------------------------------------------------

    @abstractmethod
    def start_workers(self) -> dict[Role, WorkerGroup]:
        """Start all roles; the actor's is the first."""

    @abstractmethod
    def train_step(self, batch: DataProto, timer: Timer) -> dict[str, float]:
        """One training step on the prompts or rows of ``batch``; returns its metrics."""

    def load_val_batches(self) -> list[DataProto]:
        """The validation prompts, collated."""
        return self.task.val_batches(self.task.data.dataset)

    def model_paths(self) -> dict[Role, str]:
        """The folders of the models, of the actor's first; a role that is not there has the actor's."""
        return {Role.ACTOR_ROLLOUT: self.task.model.path}

    def should_stop(self) -> bool:
        """Whether to end before ``total_steps``; asked before each step."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the trainer itself, beside step, data and best accuracy; JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""

    def scheduled(self, optim: OptimConfig) -> OptimConfig:
        """Return ``optim`` with a schedule of the run's length, unless it sets another."""
        if optim.total_training_steps >= 1:
            return optim
        return replace(optim, total_training_steps=self.total_steps)

    # -- the loop -----------------------------------------------------------------------------

    def setup(self) -> None:
        """Read the data, start the workers, and go back to the last checkpoint if there is one."""
        task = self.task
        self.batches = task.train_batches()
        self.total_steps = task.trainer.steps(self.batches.batches_per_epoch)
        self.scorer = task.scorer()
        self.val_batches = self.load_val_batches()
        task.start()
        self.groups = self.start_workers()
        self.group = next(iter(self.groups.values()))
        self.sampler = task.start_sampler(self.groups)
        trained = [group for role, group in self.groups.items() if role.trains]
        self.saver = CheckpointSaver(task.checkpoints, trained, task.trainer.async_save, self._announce)
        if task.start_step:
            self._resume(task.start_step)

    def fit(self) -> RunResult:
        """Set up, and run all steps that are left; once, inside the task's context."""
        self.setup()
        error: BaseException | None = None
        self.task.emit("on_fit_start", trainer=self)
        try:
            with frozen_heap():
                self._run()
        except BaseException as raised:
            error = raised
            if isinstance(raised, Exception):
                self.saver.rescue()
            self.task.emit("on_exception", trainer=self, error=raised)
            raise
        finally:
            self.task.emit("on_fit_end", trainer=self, error=error)
        return RunResult(self.step, self.task.run_dir, dict(self._latest))

    def _run(self) -> None:
        if self._is_complete():
            logger.info("%s is complete at step %d of %d", self.task.run_dir, self.step, self.total_steps)
        with mark("update_weights"):
            self.sync_weights()
        if self.step == 0 and self.task.trainer.val_before_train and self.val_batches:
            with mark("validate"):
                metrics = self.validate()
            self._report(metrics)
        while not self._is_complete():
            self.saver.settle()
            with mark(f"step {self.step + 1}"):
                self._one_step()
        self.saver.settle(wait=True)
        if self.task.trainer.export:
            self.export()

    def _is_complete(self) -> bool:
        return self.step >= self.total_steps or self.should_stop()

    def _one_step(self) -> None:
        step = self.step + 1
        self.task.emit("on_step_start", trainer=self, step=step)
        timer, start = Timer(), time.perf_counter()
        self._seeds.begin(f"step {step}")
        metrics = self.train_step(next(self.batches), timer)
        self.step = step
        with timer.phase("update_weights"):
            metrics |= self.sync_weights()
        metrics["time/step_s"] = time.perf_counter() - start
        metrics |= self.meter.metrics(metrics["time/step_s"])
        if self.val_batches and self._is_due(self.task.trainer.test_freq):
            with timer.phase("validate"):
                metrics |= self.validate()
        self._report({**metrics, **timer.metrics()})
        # After the metrics are written, so that they are complete up to any checkpoint.
        if self._is_due(self.task.trainer.save_freq):
            with mark("save_checkpoint"):
                self.save_checkpoint()
        self.task.emit("on_step_end", trainer=self, step=step, metrics=self.metrics)

    def _is_due(self, every: int) -> bool:
        return every > 0 and (self.step % every == 0 or self._is_complete())

    def _report(self, metrics: dict[str, float]) -> None:
        self.metrics = {"step": float(self.step), **{key: float(value) for key, value in metrics.items()}}
        self._latest |= self.metrics
        self.task.emit("on_metrics", trainer=self, step=self.step, metrics=self.metrics)

    # -- named steps --------------------------------------------------------------------------

    def sync_weights(self) -> dict[str, float]:
        """Hand the actor's weights to the rollout, as the version of the present step."""
        return self.sampler.sync(self.step)

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
        """Responses for the prompts, joined with the prompts' own columns and cut to the longest.

        Each row has a seed of its own, so a rollout that goes by it samples the same on any number of ranks.
        """
        seeds = {"seed": self._seeds.draw(len(prompts))}
        output = self.sampler.generate(prompts.select(_PROMPT_COLUMNS).with_columns(seeds), sampling)
        return prompts.drop(_PROMPT_COLUMNS).joined(trim_responses(output))

    def infer(self, role: Role, method: str, batch: DataProto) -> DataProto:
        """What a method of a role's workers gives for each row of ``batch``, in order."""
        self.sampler.rest()
        ranks = self.ranks_of(role) if self.task.trainer.balance_batch else 1
        played_as, tokens = self._played_as(role), int(batch["response_mask"].sum())
        with self.meter.measuring(role, played_as, method, row_lengths(batch), tokens):
            return spread_rows(getattr(self.groups[played_as], method), batch, ranks)

    def update(
        self,
        role: Role,
        method: str,
        batch: DataProto,
        mini_batches: Sequence[torch.Tensor],
        epochs: int = 1,
        skip_rows: torch.Tensor | None = None,
    ) -> dict[str, float]:
        """Optimizer steps by a method of a role's workers, one a mini-batch and epoch; gives their metrics.

        The arguments are those of :func:`~rollcast_trainer.batching.plan_update`.
        """
        self.sampler.rest()
        ranks, played_as = self.ranks_of(role), self._played_as(role)
        lengths = row_lengths(batch)
        balanced = lengths if self.task.trainer.balance_batch and ranks > 1 else None
        longest = self.task.data.max_response_length
        arranged, plan = plan_update(batch, mini_batches, ranks, longest, epochs, skip_rows, balanced)
        if role is Role.ACTOR_ROLLOUT:
            self.meter.count_tokens(sum(lengths))
        passed = torch.cat(list(mini_batches)).repeat(epochs)
        passed = passed if skip_rows is None else passed[~skip_rows[passed]]
        tokens = int(batch["response_mask"].sum(-1)[passed].sum())
        rows = [lengths[row] for row in passed.tolist()]
        with self.meter.measuring(role, played_as, method, rows, tokens, "train"):
            return dict(getattr(self.groups[played_as], method)(arranged, plan)[0])

    def validate(self) -> dict[str, float]:
        """Generate and score the validation prompts."""
        sampling, repeats = self.sampling(validation=True), self.task.rollout.val_kwargs.n
        self._seeds.begin(f"validation {self.step}")
        scored: list[Scored] = []
        for batch in self.val_batches:
            prompts = batch.repeat(repeats, interleave=True) if repeats > 1 else batch
            scored.append(self.scorer.score(self.generate(prompts, sampling)))
        rows = [row for part in scored for row in part.as_rows()]
        extract = answer_extractor(self.scorer.reward)
        metrics = {**summarize_samples(rows, max(repeats, 1), extract, self.task.trainer.seed), **summarize(rows)}
        self.best_accuracy = max(self.best_accuracy, metrics["val/accuracy"])
        logged = pick_samples(rows, self.task.trainer.log_val_generations)
        self.task.emit("on_validation_end", trainer=self, step=self.step, metrics=metrics, samples=logged)
        return metrics

    def export(self) -> None:
        """Write the actor as a Hugging Face folder, complete or not at all.

        Raises:
            CheckpointError: it cannot be written.
        """
        with replacing_folder(self.task.run_dir / "export") as folder:
            self.group.export(str(folder.resolve()))

    def save_checkpoint(self) -> None:
        """Write ``checkpoints/step_N``, complete or not at all; with ``trainer.async_save`` while training goes on.

        Raises:
            CheckpointError: it cannot be written, or the one before could not; the earlier ones are whole.
        """
        has_best = self.best_accuracy > float("-inf")
        state: dict[str, Any] = {
            "step": self.step,
            "data": self.batches.state_dict(),
            "best_accuracy": self.best_accuracy if has_best else None,
            "accuracy": self.metrics.get("val/accuracy"),
            "trainer": self.state_dict(),
        }
        self.saver.save(self.step, state)

    def _announce(self, step: int, path: Path) -> None:
        self.task.emit("on_checkpoint_saved", trainer=self, step=step, path=str(path))

    def _resume(self, step: int) -> None:
        state = self.task.checkpoints.load_state(step)
        self.batches.load_state_dict(state["data"])
        if state["best_accuracy"] is not None:
            self.best_accuracy = float(state["best_accuracy"])
        self.load_state_dict(state.get("trainer", {}))
        path = self.task.checkpoints.path(step)
        for role, group in self.groups.items():
            if role.trains:
                group.load_checkpoint(str(path.resolve()))
        self.step = step
        logger.info("resumed from %s", path)

    def forward_settings(self) -> ForwardSettings:
        """How batches go through the model in updates."""
        actor = self.task.actor
        return ForwardSettings(
            temperature=self.task.rollout.temperature or 1.0,
            micro_batch_size_per_gpu=actor.ppo_micro_batch_size_per_gpu,
            max_token_len_per_gpu=actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else None,
            max_response_length=self.task.data.max_response_length,
        )
