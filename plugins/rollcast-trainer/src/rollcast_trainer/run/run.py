"""Run: the resources of a run, entered and left, and what its stages share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, Self

from omegaconf import DictConfig, OmegaConf
from pluggy import HookCaller, HookRelay

from rollcast import WorkerGroup
from rollcast.contracts.command import show_progress
from rollcast.contracts.rollout import RolloutMode, SamplingParams
from rollcast.contracts.runtime import Runtime
from rollcast.contracts.stage import Stage
from rollcast.errors import ConfigError
from rollcast.protocol import DataProto
from rollcast_report.tracker_set import TrackerSet
from rollcast_rewards.reward_worker import RewardWorkers
from rollcast_rewards.scoring import RewardScorer, RewardSetup
from rollcast_serving.command_judge import NEEDS_JUDGE
from rollcast_serving.manager import Stragglers
from rollcast_serving.replica_loop import ReplicaLoop
from rollcast_serving.replicas import Replicas
from rollcast_serving.requests import check_token_ids, configured_sampling
from rollcast_serving.sampler import Canary, InProcessSampler, ReplicaSampler, Sampler
from rollcast_trainer.batch.columns import PROMPT, prompt_columns
from rollcast_trainer.run.data import Prompts, train_batches
from rollcast_trainer.run.groups import RunGroups, build_runtime
from rollcast_trainer.run.preparation import check_positions, preprocess_data, train_warm_start
from rollcast_trainer.run.recorder import Recorder
from rollcast_trainer.run.remote_checkpoints import RemoteCheckpoints
from rollcast_trainer.run.replay import RolloutRecord, StoppedSampler, fingerprints
from rollcast_trainer.run.run_dir import Checkpoints, lock_run_dir, prepare_run_dir, write_config
from rollcast_trainer.run.run_lock import RunLock
from rollcast_trainer.run.seeds import RowSeeds
from rollcast_trainer.run.settings import RunSettings
from rollcast_trainer.run.setups import list_workers
from rollcast_trainer.run.supply import Place
from rollcast_trainer.run.timeline import Timeline, check_timeline
from rollcast_trainer.workers.busy import stop_watch
from rollcast_trainer.workers.meter import Meter
from rollcast_trainer.workers.role_group import RoleGroup, Update
from rollcast_trainer.workers.roles import Role

__all__ = ["Run"]

#: Maximum number of tokens of the canary's prompt.
_CANARY_PROMPT = 8


class Run:
    """A run: its settings, its resources while it is entered, and what stages, validation and loop share.

    The constructor builds the stages; it starts and writes nothing. Entering the context locks the run directory and
    prepares the data files. :meth:`start` starts the runtime and the workers. Leaving the context stops the workers
    and closes the trackers.

    Attributes:
        settings: the checked configuration.
        stages: stages of a step; ``settings.places`` has their names and declarations.
        trainer: value of the argument ``trainer`` of hooks.
        completed: number of completed training steps.
        start_step: step of the checkpoint from which the run resumes; 0 for a new run.
        total_steps: training steps of the run; 0 before :meth:`start`.
        checkpoints: checkpoint folder.
        remote: copies of the checkpoints at ``trainer.default_hdfs_dir``; None without it.
        model_paths: folder of each role's model; filled by :meth:`start`.
        recorder: metrics and times of the current step.
        timeline: busy intervals of stages and pools.
        meter: counter of the cost of worker calls; a hook may replace it in ``on_fit_start``.
        seeds: seeds of generated rows.
        prompts, val_prompts: training prompts, and validation prompts; set by :meth:`start`.
        rollout_record: rollouts that this run writes or trains on.
        generator: function from prompts to responses; a stage that samples in its own way replaces it.
        on_synced: callbacks that receive the weight version after each weight sync.

    Raises:
        RollcastError: a stage cannot work with the configuration.
    """

    prompts: Prompts
    val_prompts: list[DataProto]

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        trainer = settings.trainer
        self.checkpoints = Checkpoints(
            settings.run_dir / "checkpoints", trainer.max_ckpt_to_keep, trainer.keep_best_ckpt
        )
        folder = trainer.default_hdfs_dir
        self.remote = RemoteCheckpoints(folder, settings.run_dir) if folder is not None else None
        self.rollout_record = RolloutRecord(settings.replay_of or settings.run_dir)
        self.start_step = 0
        self._trackers = TrackerSet(settings.config.trackers, settings.config.get("tracker_kwargs"))
        self._lock: RunLock | None = None
        self._groups: RunGroups | None = None
        self._begin()

    def _begin(self) -> None:
        """Set the state of an attempt to its start, and build the stages."""
        self.trainer: Any = None
        self.completed = self.total_steps = 0
        self.model_paths: dict[str, str] = {}
        self.timeline = Timeline(self.settings.pool_of)
        self.recorder = Recorder(self.timeline.add_stage)
        self.meter = Meter()
        self.seeds = RowSeeds(self.settings.trainer.seed)
        self.generator: Callable[[DataProto, SamplingParams], DataProto] = self.respond
        self.on_synced: list[Callable[[int], None]] = []
        #: Phase and call of each update whose metrics are not recorded yet.
        self._updates: list[tuple[str, Update]] = []
        self._loop: ReplicaLoop | None = None
        self._judge: Replicas | None = None
        self._scorer: RewardScorer | None = None
        self._sampler: Sampler | None = None
        self.stages: list[Stage] = [place.stage(self) for place in self.settings.places]

    # -- resources ----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        settings = self.settings
        self._lock = lock_run_dir(settings.run_dir, settings.trainer.resume_mode)
        try:
            if self.remote is not None and settings.trainer.resume_mode != "disable":
                self.remote.fetch()
            self.start_step = prepare_run_dir(settings.run_dir, settings.plain)
            write_config(settings.run_dir, OmegaConf.to_yaml(settings.config))
            if preprocess_data(settings.data, settings.trainer.seed):
                self.settings = settings = settings.reread()
            check_positions(settings.model.path, settings.data)
            check_token_ids(settings.rollout, settings.model.path)
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with ExitStack() as stack:
            # With the runtime `local` the workers ran in this process, so their clock has to be stopped here.
            stack.callback(stop_watch)
            if self._lock is not None:
                stack.callback(self._lock.release)
            if self.remote is not None:
                stack.callback(self.remote.abandon)
            if self._groups is not None:
                stack.callback(self._groups.close)
            self._close_attempt(stack)
        self._groups = None

    def _close_attempt(self, stack: ExitStack) -> None:
        """Push the close calls of an attempt's resources, so that the sampler closes first, the reward before its
        judge, and trackers last.
        """
        stack.callback(self._trackers.close)
        for resource in (self._loop, self._judge, self._scorer, self._sampler):
            if resource is not None:
                stack.callback(resource.close)
        self._loop = self._judge = self._scorer = self._sampler = None

    def begin_again(self) -> None:
        """Close the resources of a failed attempt, and begin the next one at the last checkpoint.

        The runtime and the groups are kept; :meth:`start` restarts the groups.
        """
        with ExitStack() as stack:
            self._close_attempt(stack)
        self.start_step = max(self.checkpoints.steps(), default=0)
        self._begin()

    def start(self) -> None:
        """Read the data, and start the runtime, the trackers, the workers of all roles and the rollout.

        Raises:
            ConfigError, DataError: the data or the reward cannot be used.
            ResourceError: the machines lack the resources that the run asks for.
            WorkerError: a worker, a model or a replica cannot be started.
        """
        settings = self.settings
        batches = train_batches(settings)
        self.prompts = Prompts(batches)
        self.total_steps = settings.trainer.steps(batches.batches_per_epoch)
        if settings.replay_of is None:
            self._build_scorer()
            self.val_prompts = settings.trainer_class.val_batches(settings)
        else:
            self.val_prompts = []  # validation would need to generate
            self.rollout_record.check_steps(self.start_step + 1, self.total_steps)
        check_timeline(settings.run_dir, self.start_step)
        self.start_runtime()
        self._trackers.start(settings.hooks, settings.run_dir, settings.plain, self.start_step)
        if settings.records_rollouts:
            self.rollout_record.begin(fingerprints(self.settings), self.start_step)
        elif settings.replay_of is not None:
            self.rollout_record.check_parts(fingerprints(self.settings), self.settings.model.path)
        self.start_workers()

    def start_runtime(self) -> None:
        """Start the runtime, and train the warm start if there is one.

        Raises:
            ResourceError: the machines lack the resources that the run asks for.
        """
        settings = self.settings
        if self._groups is None:
            with show_progress(f"starting the runtime {settings.config.runtime.name}"):
                self._groups = RunGroups(build_runtime(settings))
        settings.pools.check(self._groups.runtime.nodes())
        if settings.trainer.warm_start is not None:
            # Recording applies to the run itself, not to its warm start.
            shared = {
                "runtime": {**settings.plain["runtime"], "record": None, "record_trajectories": False},
                "placement": settings.plain["placement"],
            }
            exported = train_warm_start(settings.trainer.warm_start, settings.run_dir, settings.trainer.seed, shared)
            model = dataclasses.replace(settings.model, path=str(exported), random_init=False)
            self.settings = dataclasses.replace(settings, model=model)

    def start_workers(self) -> None:
        """Start the workers of all roles and the rollout, as the stages need them.

        Raises:
            ResourceError: a pool cannot be placed.
            WorkerError: a worker, a model or a replica cannot be started.
        """
        if self._groups is None:
            raise RuntimeError("Run.start_runtime has to be called first, inside the context")
        settings, runtime = self.settings, self._groups.runtime
        workers, self.model_paths = list_workers(settings, self.stages, self.total_steps)
        # Workers that were writing a checkpoint have ended when groups are restarted.
        groups = self._groups.start(settings, workers, self.checkpoints.clean)
        if settings.judge is not None or settings.starts_replicas:
            self._loop = ReplicaLoop()
        self._sampler = self._build_sampler(runtime, self._loop)
        self.timeline.watch(groups)
        if settings.has_reward_workers and self._scorer is not None:
            self._scorer.score_by(RewardWorkers(groups[Role.REWARD]))
        if settings.judge is not None and self._loop is not None:
            scorers = [] if self._scorer is None else [self._scorer]
            self._judge = settings.judge.start(groups[Role.JUDGE], runtime, self._loop, scorers, self._judge_busy)

    def _judge_busy(self) -> AbstractContextManager[None]:
        return self.timeline.replicas_busy("reward", Role.JUDGE)

    def _build_scorer(self) -> None:
        """Set the scorer of the run's reward, which is connected to its workers when they start.

        Raises:
            ConfigError: the reward needs a judge, and the run has none.
        """
        settings = self.settings
        setup = RewardSetup.of(settings.reward, settings.data.max_response_length)
        scorer = self._scorer = RewardScorer(setup, settings.tokenizer)  # set before the checks, so that it is closed
        if scorer.uses_judge and settings.has_reward_workers:
            raise ConfigError(
                f"placement.mapping.reward puts the rewards in a pool, but reward.name={settings.reward.name} calls "
                "the judge from the trainer's process; remove the role reward from placement.mapping"
            )
        if scorer.uses_judge and settings.judge is None:
            raise ConfigError(f"reward.name={settings.reward.name} {NEEDS_JUDGE}")
        scorer.follow(lambda: (self.completed, self.total_steps))

    def _build_sampler(self, runtime: Runtime, loop: ReplicaLoop | None) -> Sampler:
        """Return the sampler that generates with the actor's weights.

        Raises:
            WorkerError: a replica cannot be started.
        """
        settings, rollout = self.settings, self.settings.rollout
        if settings.replay_of is not None:
            return StoppedSampler()
        actor = next(iter(self.groups.values()))
        if not settings.uses_replicas:
            return InProcessSampler(actor, rollout.enable_rollout_routing_replay)
        replicas = settings.served.start(self.groups[Role.ROLLOUT], runtime, loop)
        return ReplicaSampler(actor, replicas, self._canary(), rollout.mode == RolloutMode.HYBRID.value)

    def _canary(self) -> Canary:
        """Return a canary whose prompt is spread over the vocabulary; the tokens need no meaning."""
        settings, rollout = self.settings, self.settings.rollout
        size, count = len(settings.tokenizer), min(_CANARY_PROMPT, settings.data.max_prompt_length)
        sampling = SamplingParams(
            temperature=rollout.temperature or 1.0,
            max_tokens=min(rollout.canary.max_tokens, settings.data.max_response_length),
            ignore_eos=True,
        )
        ids = [size * (place + 1) // (count + 1) for place in range(count)]
        actor = settings.engine_class.compute_dtype(settings.engine)
        return Canary(ids, sampling, rollout.canary, actor, rollout.quantization or settings.rollout_dtype)

    # -- what any stage may use: rollcast.contracts.stage.StageRun ----------------------------

    @property
    def config(self) -> DictConfig:
        """The composed configuration."""
        return self.settings.config

    @property
    def step(self) -> int:
        """Number of the current step, from 1."""
        return self.completed + 1

    def section(self, path: str, schema: type) -> Any:
        """Return a section of the configuration as an instance of its dataclass."""
        return self.settings.section(path, schema)

    def record(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the current step."""
        self.recorder.record(metrics)

    def workers(self, role: str) -> WorkerGroup:
        """Return the worker group of a role."""
        return self.role_group(role).group

    def call(self, role: str, method: Callable[[Any, DataProto], DataProto], batch: DataProto) -> DataProto:
        """Call a method of a role's workers on the rows of ``batch``, and return its output rows in the same order."""
        return self.role_group(role).infer(method, batch)

    # -- workers ------------------------------------------------------------------------------

    @property
    def groups(self) -> dict[str, WorkerGroup]:
        """Worker groups by role; empty before :meth:`start_workers`."""
        return {} if self._groups is None else self._groups.by_role

    @property
    def actor(self) -> RoleGroup:
        """The policy in training."""
        return self.role_group(Role.ACTOR_ROLLOUT)

    def role_group(self, role: str) -> RoleGroup:
        """Return the workers of a role, after the updates in flight on their pool."""
        # Calls to one pool take turns, so that each phase has its own time, and memory for one model's activations.
        self.join_updates(self.settings.pool_of(role))
        # A replica engine that shares devices with the workers frees its memory before they compute.
        self.sampler.rest()
        return self._role_group(role)

    def _role_group(self, role: str) -> RoleGroup:
        # A role without workers of its own is played by the actor's.
        host_role = role if role in self.groups else next(iter(self.groups))
        settings = self.settings
        longest = settings.data.max_response_length
        return RoleGroup(role, host_role, self.groups[host_role], self.meter, settings.trainer.balance_batch, longest)

    def ranks_of(self, role: str) -> int:
        """Return the number of data-parallel ranks of a role's workers."""
        return self._role_group(role).ranks

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
            if pool is None or self.settings.pool_of(update.role) == pool:
                self._updates.remove(entry)
                with self.recorder.phase(phase):
                    self.recorder.record(update.get())

    def order_seed(self, stream: int) -> int | None:
        """Return the seed for shuffling this step's rows into mini-batches; None keeps the batch's order."""
        if not self.settings.actor.shuffle:
            return None
        seed = int(self.settings.trainer.seed)
        return (seed * 1_000_003 + self.completed + stream * 500_009) & 0x7FFF_FFFF

    # -- generation and events ----------------------------------------------------------------

    @property
    def scorer(self) -> RewardScorer:
        """Scorer of the run's reward."""
        if self._scorer is None:
            raise RuntimeError("the run scores nothing: it has not started, or it replays recorded rollouts")
        return self._scorer

    @property
    def sampler(self) -> Sampler:
        """Sampler of the run's rollout."""
        if self._sampler is None:
            raise RuntimeError("the run has not started")
        return self._sampler

    def draw_prompts(self) -> DataProto:
        """Return the prompts of a step; empty if the rollout stage draws its own prompts ahead of time, or in a
        replay.
        """
        drawn_elsewhere = self.settings.max_staleness or self.settings.replay_of is not None
        return DataProto.from_dict({}) if drawn_elsewhere else self.prompts.draw()

    def sampling(self, validation: bool = False) -> SamplingParams:
        """Return the sampling parameters of responses for training or validation."""
        return configured_sampling(self.settings.rollout, self.settings.data.max_response_length, validation)

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

    def sync_weights(self) -> dict[str, float]:
        """Send the actor's weights to the rollout, with the number of completed steps as their version."""
        with self.timeline.replicas_busy("update_weights"):
            metrics = self.sampler.sync(self.completed)
        for tell in self.on_synced:
            tell(self.completed)
        return metrics

    def run_stage(self, place: Place, stage: Stage, batch: DataProto) -> DataProto:
        """Return the batch after a stage, whose time is recorded."""
        with self.recorder.phase(stage.phase or place.name):
            return stage(batch)

    @property
    def hook(self) -> HookRelay:
        """Hooks of all trackers and plugins, such as ``run.hook.on_step_start(trainer=..., step=...)``."""
        return self.settings.hooks.hook

    def emit_batch(self, hook: HookCaller, batch: DataProto) -> None:
        """Call a hook with the trainer, the current step and its batch."""
        hook(trainer=self.trainer, step=self.step, batch=batch)
