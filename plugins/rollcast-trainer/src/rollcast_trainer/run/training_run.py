"""The run as stages see it: configuration, workers, sampling, scoring and the metrics of the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from rollcast import WorkerGroup
from rollcast.contracts.engine import ForwardSettings
from rollcast.contracts.rollout import SamplingParams
from rollcast.contracts.stage import Stage, roles
from rollcast.contracts.worker import ClassWithInitArgs
from rollcast.protocol import DataProto
from rollcast_rewards.scoring import RewardScorer
from rollcast_serving.manager import Stragglers
from rollcast_serving.requests import configured_sampling
from rollcast_serving.sampler import Sampler
from rollcast_trainer.batch.columns import PROMPT, prompt_columns
from rollcast_trainer.run.prompts import Prompts
from rollcast_trainer.run.recorder import Recorder
from rollcast_trainer.run.replay import StoppedSampler
from rollcast_trainer.run.seeds import RowSeeds
from rollcast_trainer.run.supply import Place
from rollcast_trainer.run.task_runner import TaskRunner
from rollcast_trainer.run.timeline import Timeline
from rollcast_trainer.workers.meter import Meter
from rollcast_trainer.workers.role_group import RoleGroup, Update
from rollcast_trainer.workers.roles import Role
from rollcast_trainer.workers.training import WorkerSetup

__all__ = ["TrainingRun"]


class TrainingRun:
    """State shared by stages, validation and the training loop.

    Attributes:
        task: config sections, run directory, data and runtime.
        trainer: value of the argument ``trainer`` of hooks.
        roles: names of the roles that the stages call, the actor's first.
        groups: worker groups by role; empty before :meth:`start`.
        recorder: metrics and times of the current step.
        timeline: busy intervals of stages and pools.
        columns_read: columns that the stages of the list read.
        model_paths: folder of each role's model; filled by :meth:`start`.
        meter: counter of the cost of worker calls; a hook may replace it in ``on_fit_start``.
        seeds: seeds of generated rows.
        total_steps: training steps of the run; 0 before the data is read.
        scorer, sampler: the reward's scorer and the rollout's sampler; set when the run starts.
        generator: function from prompts to responses; a stage that samples in its own way replaces it.
        resample: function that returns the rows of further prompts as they reach the given stage.
        prompts: training prompts; set before the run starts.
        on_synced: callbacks that receive the weight version after each weight sync.
    """

    scorer: RewardScorer
    sampler: Sampler
    prompts: Prompts
    resample: Callable[[Stage], DataProto]

    def __init__(self, task: TaskRunner, trainer: Any) -> None:
        self.task = task
        self.trainer = trainer
        self.roles: list[str] = [str(Role.ACTOR_ROLLOUT)]
        self.groups: dict[str, WorkerGroup] = {}
        self.timeline = Timeline(task.pool_of)
        self.recorder = Recorder(self.timeline.add_stage)
        self.meter = Meter()
        self.seeds = RowSeeds(task.trainer.seed)
        self.total_steps = 0
        self.model_paths: dict[str, str] = {}
        self.columns_read: frozenset[str] = frozenset()
        self.on_synced: list[Callable[[int], None]] = []
        self.generator: Callable[[DataProto, SamplingParams], DataProto] = self.respond
        #: Phase and call of each update whose metrics are not recorded yet.
        self._updates: list[tuple[str, Update]] = []

    # -- what any stage may use: rollcast.contracts.stage.StageRun ----------------------------

    @property
    def config(self) -> DictConfig:
        """The composed configuration."""
        return self.task.config

    @property
    def step(self) -> int:
        """Number of the current step, from 1."""
        return int(self.trainer.step) + 1

    def section(self, path: str, schema: type) -> Any:
        """Return a section of the configuration as an instance of its dataclass."""
        return self.task.section(path, schema)

    def record(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the current step."""
        self.recorder.record(metrics)

    def follow(self, phase: str, update: Update) -> None:
        """Let an update run beside calls to other pools; its metrics are recorded when it is joined.

        Args:
            phase: phase that counts the time that the trainer waits for the update.
            update: the update in flight.
        """
        self._updates.append((phase, update))

    def join_updates(self, pool: str | None = None) -> None:
        """Wait for the updates in flight on a pool, or all of them, and record their metrics."""
        for entry in list(self._updates):
            phase, update = entry
            if pool is None or self.task.pool_of(update.role) == pool:
                self._updates.remove(entry)
                with self.recorder.phase(phase):
                    self.record(update.get())

    def workers(self, role: str) -> WorkerGroup:
        """Return the worker group of a role."""
        return self.role_group(role).group

    def call(self, role: str, method: Callable[[Any, DataProto], DataProto], batch: DataProto) -> DataProto:
        """Call a method of a role's workers on the rows of ``batch``, and return its output rows in the same order."""
        return self.role_group(role).infer(method, batch)

    @property
    def max_staleness(self) -> int:
        """Steps by which rollouts may start ahead of the step that trains on them; 0 alternates generation and
        training.
        """
        return int(getattr(self.task.trainer, "max_staleness", 0))

    # -- workers ------------------------------------------------------------------------------

    @property
    def actor(self) -> RoleGroup:
        """The policy in training."""
        return self.role_group(Role.ACTOR_ROLLOUT)

    def role_group(self, role: str) -> RoleGroup:
        """Return the workers of a role, after the updates in flight on their pool."""
        # Calls to one pool take turns, so that each phase has its own time, and memory for one model's activations.
        self.join_updates(self.task.pool_of(role))
        # A replica engine that shares devices with the workers frees its memory before they compute.
        self.sampler.rest()
        host_role = self.host_role(role)
        settings = self.task.trainer
        longest = self.task.data.max_response_length
        return RoleGroup(role, host_role, self.groups[host_role], self.meter, settings.balance_batch, longest)

    def host_role(self, role: str) -> str:
        """Return the role itself if it has workers of its own, else the actor's role, whose workers then serve both."""
        return role if role in self.groups else next(iter(self.groups))

    def ranks_of(self, role: str) -> int:
        """Return the number of data-parallel ranks of a role's workers."""
        host_role = self.host_role(role)
        return RoleGroup(role, host_role, self.groups[host_role], self.meter, False, 0).ranks

    # -- start --------------------------------------------------------------------------------

    def use(self, places: Sequence[Place]) -> None:
        """Set the list of stages, which determines the roles to start and the columns that are read."""
        called = [role for place in places for role in place.spec.roles]
        self.roles = list(dict.fromkeys([str(Role.ACTOR_ROLLOUT), *map(str, called)]))
        self.columns_read = frozenset(name for place in places for name in (*place.spec.reads, *place.spec.optional))

    def start(self, stages: Sequence[Stage]) -> None:
        """Start the sampler and the workers of all roles; the stages that call a role configure its workers."""
        setups = {role: self._base_setup(role) for role in self.roles}
        for stage in stages:
            setups = {role: stage.configure(role, setup) for role, setup in setups.items()}
        self.model_paths = {role: setup.model.path for role, setup in setups.items() if hasattr(setup, "model")}
        setups = self._fuse_reference(setups)
        classes = {role: roles.get(self.task.worker_role(role)) for role in setups}
        workers = {role: ClassWithInitArgs(classes[role], setup) for role, setup in setups.items()}
        self.groups = self.task.start_roles(workers)
        is_replay = self.task.replay_of is not None
        self.sampler = StoppedSampler() if is_replay else self.task.start_sampler(self.groups)
        self.timeline.watch(self.groups)
        self.task.start_rewards(self.groups, lambda: self.timeline.replicas_busy("reward", Role.JUDGE))

    def _base_setup(self, role: str) -> WorkerSetup:
        """Return the default setup of a role's workers: a frozen model on the role's engine. Stages adjust it."""
        task, settings = self.task, self.forward_settings()
        is_actor = role == Role.ACTOR_ROLLOUT
        key = "actor" if is_actor else role
        return task.worker_setup(
            key=key,
            engine=task.role_engine(key),
            model=task.model if is_actor else task.model.without_adapter(),
            optim=self.schedule(task.actor.optim) if is_actor else None,
            rollout=task.rollout if is_actor and task.replay_of is None else None,
            rollout_dtype=task.rollout_dtype if is_actor and task.uses_replicas else None,
            loss_function=None,
            has_reference=False,
            forward=settings,
            infer=settings,
        )

    def _fuse_reference(self, setups: Mapping[str, WorkerSetup]) -> dict[str, WorkerSetup]:
        """Merge the reference into the actor's workers if both have the same engine and pool."""
        actor, reference = setups[Role.ACTOR_ROLLOUT], setups.get(Role.REF)
        if reference is None or self.task.has_own_pool(Role.REF) or reference.engine != actor.engine:
            return dict(setups)
        moves, offloads = reference.reference_moves, reference.offload_reference
        fused = replace(actor, has_reference=True, offload_reference=offloads, reference_moves=moves)
        others = {role: setup for role, setup in setups.items() if role not in (Role.ACTOR_ROLLOUT, Role.REF)}
        return {Role.ACTOR_ROLLOUT_REF: fused, **others}

    def schedule(self, optim: Any) -> Any:
        """Return optimizer settings with the schedule as long as the run, unless they set a length."""
        if optim.total_training_steps >= 1:
            return optim
        return replace(optim, total_training_steps=self.total_steps)

    def forward_settings(self) -> ForwardSettings:
        """Return the settings of forward passes in updates."""
        actor = self.task.actor
        return ForwardSettings(
            temperature=self.task.rollout.temperature or 1.0,
            micro_batch_size_per_gpu=actor.ppo_micro_batch_size_per_gpu,
            max_token_len_per_gpu=actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else None,
            max_response_length=self.task.data.max_response_length,
        )

    def is_read(self, column: str) -> bool:
        """Return True if a stage of the list reads a column; a name that ends with ``/`` is a prefix."""
        return any(name == column or (column.endswith("/") and name.startswith(column)) for name in self.columns_read)

    def order_seed(self, stream: int) -> int | None:
        """Return the seed for shuffling this step's rows into mini-batches; None keeps the batch's order."""
        if not self.task.actor.shuffle:
            return None
        seed = int(self.task.trainer.seed)
        return (seed * 1_000_003 + self.step - 1 + stream * 500_009) & 0x7FFF_FFFF

    # -- generation and events ----------------------------------------------------------------

    def sampling(self, validation: bool = False) -> SamplingParams:
        """Return the sampling parameters of responses for training or validation."""
        return configured_sampling(self.task.rollout, self.task.data.max_response_length, validation)

    def generate(self, prompts: DataProto, sampling: SamplingParams) -> DataProto:
        """Return the rows that ``generator`` makes from each prompt, with the prompts' other columns."""
        return self.generator(prompts, sampling)

    def respond(self, prompts: DataProto, sampling: SamplingParams, stragglers: Stragglers | None = None) -> DataProto:
        """Return one response for each prompt.

        Each row has its own seed, so that rollouts that use it sample the same on any number of ranks.

        Args:
            prompts: columns of a dataset's batch.
            sampling: sampling parameters of all responses.
            stragglers: policy for cutting late responses; None waits for all.
        """
        seeds = {"seed": self.seeds.draw(len(prompts))}
        with self.timeline.replicas_busy("generate"):
            output = self.sampler.generate(
                prompts.select(prompt_columns(prompts)).with_columns(seeds), sampling, stragglers
            )
        return prompts.drop(PROMPT).joined(output)

    def emit(self, event: str, **values: Any) -> None:
        """Call a hook of all trackers and plugins, with the trainer as an argument."""
        self.task.emit(event, trainer=self.trainer, **values)

    def emit_batch(self, event: str, batch: DataProto) -> None:
        """Call a hook with the current step and its batch."""
        self.emit(event, step=self.step, batch=batch)
