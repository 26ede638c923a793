"""TaskRunner: the resources of a run, started in order and always stopped."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from omegaconf import DictConfig, OmegaConf

from rollcast import WorkerGroup, build_section, start_groups
from rollcast.contracts.command import show_progress
from rollcast.contracts.device import hide_accelerators
from rollcast.contracts.engine import BaseEngine, engines
from rollcast.contracts.hooks import build_hook_manager
from rollcast.contracts.rollout import BaseRollout, RolloutMode, SamplingParams, rollouts
from rollcast.contracts.runtime import Runtime, runtimes
from rollcast.contracts.sections import PlacementConfig
from rollcast.contracts.storage import NodeCopies, fetch_files
from rollcast.contracts.trainer import RunResult
from rollcast.contracts.worker import ClassWithInitArgs
from rollcast.errors import ConfigError, DataError, ResourceError
from rollcast.protocol import DataProto
from rollcast_data.contract import BaseDataset, datasets
from rollcast_data.loader import EpochIterator, FirstRows, build_loader
from rollcast_data.schemas import DataConfig
from rollcast_data.tokenizer import load_tokenizer, read_stop_token_ids
from rollcast_report.tracker_set import TrackerSet
from rollcast_rewards.reward_worker import RewardWorker, RewardWorkers, RewardWorkerSetup
from rollcast_rewards.schemas import RewardConfig
from rollcast_rewards.scoring import RewardScorer, RewardSetup
from rollcast_serving.adapters import take_adapters
from rollcast_serving.command_judge import NEEDS_JUDGE, CommandJudge
from rollcast_serving.contracts.generator import dataset_name
from rollcast_serving.contracts.weight_sync import BaseWeightSync, weight_syncs
from rollcast_serving.engines.arguments import check_device_arguments
from rollcast_serving.negotiation import Choice, check_choice, check_places, check_quantization, check_world_sizes
from rollcast_serving.pools import build_pools
from rollcast_serving.replica_loop import ReplicaLoop
from rollcast_serving.replicas import Replicas
from rollcast_serving.requests import check_sampling, check_token_ids, configured_sampling
from rollcast_serving.sampler import Canary, InProcessSampler, ReplicaSampler, Sampler
from rollcast_serving.schemas import JudgeConfig
from rollcast_serving.served import ServedModel, ServedRole
from rollcast_serving.shapes import ReplicaShape
from rollcast_trainer.recording import CallRecorder
from rollcast_trainer.run.preparation import check_positions, preprocess_data, train_warm_start
from rollcast_trainer.run.remote_checkpoints import RemoteCheckpoints
from rollcast_trainer.run.run_dir import Checkpoints, lock_run_dir, prepare_run_dir, write_config
from rollcast_trainer.run.run_lock import RunLock
from rollcast_trainer.schemas import RunConfig
from rollcast_trainer.workers.busy import stop_watch
from rollcast_trainer.workers.roles import Role, placed_as, role_trains
from rollcast_trainer.workers.training import WorkerSetup

if TYPE_CHECKING:
    from pluggy import PluginManager
    from transformers import PreTrainedTokenizerBase

__all__ = ["TaskRunner"]

logger = logging.getLogger(__name__)
#: Maximum number of tokens of the canary's prompt.
_CANARY_PROMPT = 8


class TaskRunner:
    """The resources that trainers share: config sections, run directory, data, runtime, groups and trackers.

    The constructor reads the config and loads the plugins; it starts and writes nothing. Entering the context locks the
    run directory and prepares the data files. :meth:`start` starts the runtime. Leaving the context stops the workers
    and closes the trackers.

    Args:
        config: the composed config.
        schema: the trainer's schema; its fields are the sections that the trainer reads.

    Raises:
        ConfigError: a section has a wrong value.
        PluginError: an engine, rollout, tracker or runtime does not exist or does not load.
        CapabilityError: engine, rollout and weight sync cannot work together.
    """

    def __init__(self, config: DictConfig, schema: type[RunConfig] = RunConfig) -> None:
        self.config = config
        self.plain = cast("dict[str, Any]", OmegaConf.to_container(config))
        self.run_dir = Path(config.run_dir)
        #: Copies of remote models on the nodes of the run.
        self.copies = NodeCopies()
        self._schema = cast("type[Any]", schema)
        self._read_sections()
        self._runtime_class: type[Runtime] = runtimes.get(self._name_of("runtime"), requested_by="runtime.name")
        self.runtime_config = self.section("runtime", self._runtime_class.config_schema)
        self.placement = self.section("placement", PlacementConfig)
        self.data = self.section("data", DataConfig)
        self.reward = self.section("reward", RewardConfig)
        self.engine_class: type[BaseEngine] = engines.get(self._name_of("actor.engine"))
        self.engine = self.section("actor.engine", self.engine_class.config_schema)
        self.rollout_class: type[BaseRollout] = rollouts.get(self._name_of("rollout"))
        self.rollout: Any = take_adapters(self.section("rollout", self.rollout_class.config_schema), self.model)
        self.served = ServedRole(Role.ROLLOUT, "rollout", self.rollout, self.rollout_class)
        #: Replicas of the judge model that rewards call; None in a run without a judge.
        self.judge: CommandJudge | None = None
        choice = self._choice()
        check_choice(choice, self.engine_class, self.rollout_class)
        check_quantization(self.rollout, self.rollout_class)
        check_device_arguments(self.rollout)
        for key, validation in (("rollout", False), ("rollout.val_kwargs", True)):
            check_sampling(key, configured_sampling(self.rollout, 1, validation), self.rollout_class.capabilities)
        self._trackers = TrackerSet(config.trackers, config.get("tracker_kwargs"))
        self.pools = build_pools(self.placement)
        self.pools.mapping[Role.ACTOR_ROLLOUT_REF] = self.pools.mapping[Role.ACTOR_ROLLOUT]
        rollout_pool = self.pools.get_resource_pool(Role.ROLLOUT)
        own_pool, processes = self.has_own_pool(Role.ROLLOUT), rollout_pool.process_on_nodes
        engine, rollout = self.engine_class.capabilities, self.rollout_class.capabilities
        on_devices = rollout_pool.use_gpu
        check_places(choice, not self.uses_replicas, own_pool, processes, on_devices, rollout.multi_node)
        check_world_sizes(choice, engine, rollout, self.world_size, rollout_pool.world_size)
        if self.replay_of is not None:
            self._leave_out_replicas()
        else:
            places = self.pools.get_resource_pool(Role.JUDGE).process_on_nodes
            self.judge = CommandJudge.of(self.section("judge", JudgeConfig), places)
        self.checkpoints = Checkpoints(
            self.run_dir / "checkpoints", self.trainer.max_ckpt_to_keep, self.trainer.keep_best_ckpt
        )
        folder = self.trainer.default_hdfs_dir
        #: Copies of the checkpoints at ``trainer.default_hdfs_dir``; None without it.
        self.remote = RemoteCheckpoints(folder, self.run_dir) if folder is not None else None
        self.start_step = 0
        #: Worker groups by role, as :meth:`start_roles` started them.
        self.groups: dict[str, WorkerGroup] = {}
        self._with_model: set[str] = set()
        self.hooks: PluginManager = build_hook_manager(without=config.disabled_hooks)
        self._runtime: Runtime | None = None
        self._lock: RunLock | None = None
        self._scorers: list[RewardScorer] = []
        self._samplers: list[Sampler] = []
        self._judges: list[Replicas] = []
        self._replica_loop: ReplicaLoop | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._stop_token_ids: tuple[int, ...] | None = None
        self.emit("on_configure", config=config)

    def _read_sections(self) -> None:
        #: Instance of the trainer's schema; untyped here because each trainer brings its own.
        self.sections: Any = self.copies.place(build_section(self._schema, self.config))
        self.trainer, self.model, self.actor = self.sections.trainer, self.sections.model, self.sections.actor

    def _leave_out_replicas(self) -> None:
        """Remove the pool of replicas: a replay starts none."""
        mapping = self.pools.mapping
        own = mapping[Role.ROLLOUT]
        mapping[Role.ROLLOUT] = mapping[Role.ACTOR_ROLLOUT]
        if own not in mapping.values():
            del self.pools.resource_pool_dict[own]

    def _choice(self) -> Choice:
        rollout = self.rollout
        trains_adapter = self.model.trains_adapter
        names = (self.engine.name, rollout.name, rollout.mode, rollout.weight_sync)
        return Choice(*names, ReplicaShape.of(rollout), trains_adapter, rollout.update_in_flight)

    def section(self, path: str, schema: type) -> Any:
        """Return a section of the config as an instance of its dataclass.

        Raises:
            ConfigError: a value has the wrong type.
        """
        return self.copies.place(build_section(schema, OmegaConf.select(self.config, path), path), path)

    def _name_of(self, path: str) -> str:
        name = OmegaConf.select(self.config, f"{path}.name")
        if name is None:
            group = path.rpartition(".")[2]
            raise ConfigError(f"{path}.name is not set; choose one with {group}=...")
        return str(name)

    def copy_models(self) -> None:
        """Copy remote models to this node.

        Raises:
            ResourceError: a model cannot be copied.
        """
        if self.copies.planned:
            with show_progress("copying models"):
                self.copies.make()

    # -- start and stop -----------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._lock = lock_run_dir(self.run_dir, self.trainer.resume_mode)
        try:
            if self.remote is not None and self.trainer.resume_mode != "disable":
                self.remote.fetch()
            self.start_step = prepare_run_dir(self.run_dir, self.plain)
            write_config(self.run_dir, OmegaConf.to_yaml(self.config))
            if preprocess_data(self.data, self.trainer.seed):
                self._read_sections()  # a model that was just written may have to be converted, or its config changed
            check_positions(self.model.path, self.data)
            check_token_ids(self.rollout, self.model.path)
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
            if self._runtime is not None:
                stack.callback(_tell_if_nothing_recorded, self._runtime.recorder)
                stack.callback(self._runtime.shutdown)
            self._close_parts(stack)
        self._runtime = None

    def _close_parts(self, stack: ExitStack) -> None:
        """Push the close calls of one trainer's resources, so that samplers close first, rewards before their judge,
        and trackers last.
        """
        stack.callback(self._trackers.close)
        if self._replica_loop is not None:
            stack.callback(self._replica_loop.close)
        for judge in self._judges:
            stack.callback(judge.close)
        for scorer in self._scorers:
            stack.callback(scorer.close)
        for sampler in self._samplers:
            stack.callback(sampler.close)
        self._scorers, self._samplers, self._judges, self._replica_loop = [], [], [], None

    def begin_again(self) -> int:
        """Close the resources of the failed trainer, and return the step that the next one resumes from.

        The runtime and the groups are kept; :meth:`start_roles` restarts the groups.
        """
        with ExitStack() as stack:
            self._close_parts(stack)
        self.start_step = max(self.checkpoints.steps(), default=0)
        return self.start_step

    def start(self) -> None:
        """Start the runtime, train the warm start if there is one, and start the trackers.

        Raises:
            ResourceError: the machines lack the resources that the run asks for.
        """
        if self._runtime is None:
            with show_progress(f"starting the runtime {self._name_of('runtime')}"):
                self._runtime = self._build_runtime()
        self.pools.check(self._runtime.nodes())
        if self.trainer.warm_start is not None:
            # Recording applies to the run itself, not to its warm start.
            shared = {
                "runtime": {**self.plain["runtime"], "record": None, "record_trajectories": False},
                "placement": self.plain["placement"],
            }
            exported = train_warm_start(self.trainer.warm_start, self.run_dir, self.trainer.seed, shared)
            self.model = dataclasses.replace(self.model, path=str(exported), random_init=False)
        self._trackers.start(self.hooks, self.run_dir, self.plain, self.start_step)

    def run_on_cluster(self, function: Callable[..., RunResult], *args: Any) -> RunResult:
        """Run a function in a process of the cluster and return its result; used for ``trainer.on_driver=false``.

        Raises:
            ResourceError: the runtime has no such process.
        """
        with self._build_runtime() as runtime:
            result: RunResult = runtime.run_driver(function, *args)
            return result

    def _build_runtime(self) -> Runtime:
        settings = self.runtime_config
        runtime = self._runtime_class.from_config(settings, processes=self.processes, run_dir=self.run_dir)
        if settings.record is not None:
            runtime.recorder = CallRecorder(settings.record, self.run_dir / "records")
        return runtime

    # -- what a trainer builds its loop from --------------------------------------------------

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer of the model."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.model.path, self.model.trust_remote_code)
        return self._tokenizer

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Token ids that end every response: the tokenizer's EOS, then the ids in the model's
        generation_config.json.
        """
        if self._stop_token_ids is None:
            self._stop_token_ids = read_stop_token_ids(self.model.path, self.tokenizer)
        return self._stop_token_ids

    @property
    def world_size(self) -> int:
        """Number of worker processes of the actor."""
        return self.pools.get_resource_pool(Role.ACTOR_ROLLOUT).world_size

    @property
    def processes(self) -> int:
        """Number of worker processes in all pools."""
        return sum(pool.world_size for pool in self.pools.resource_pool_dict.values())

    def pool_of(self, role: str) -> str:
        """Return the name of the pool of a role."""
        return str(self.pools.mapping[role])

    def has_own_pool(self, role: str) -> bool:
        """Return True if a role is not in the actor's pool."""
        return self.pools.mapping[role] != self.pools.mapping[Role.ACTOR_ROLLOUT]

    def build_dataset(self, key: str, name: str, **changes: Any) -> BaseDataset:
        """Return a dataset over the files of a config key, with the config's settings.

        Args:
            key: ``train_files`` or ``val_files``.
            name: registry name of the dataset.
            **changes: keys of the ``data`` section to override.
        """
        settings = {**cast("dict[str, Any]", OmegaConf.to_container(self.config.data)), **changes}
        files = fetch_files(getattr(self.data, key), f"data.{key}")
        dataset_class = cast("Any", datasets.get(dataset_name(name, self.config)))
        return cast("BaseDataset", dataset_class(files, self.tokenizer, settings))

    def train_batches(self) -> EpochIterator:
        """Return an endless iterator of training batches with ``data.train_batch_size`` rows.

        Raises:
            ConfigError, DataError: there are no files, or they hold less than one batch.
        """
        if not self.data.train_files:
            raise ConfigError("data.train_files is empty; list at least one JSONL or Parquet file")
        with _naming("data.train_files"):
            dataset = self.build_dataset("train_files", self.data.dataset)
        with _naming("data.train_batch_size"):
            size, workers = self.data.train_batch_size, self.data.num_workers
            return EpochIterator(build_loader(dataset, size, self.data.shuffle, self.trainer.seed, True, workers))

    def val_batches(self, dataset_name: str, **changes: Any) -> list[DataProto]:
        """Return the validation prompts in batches; empty without ``data.val_files``.

        Args:
            dataset_name: registry name of a dataset of prompts.
            **changes: keys of the ``data`` section to override.

        Raises:
            DataError: a file or row is missing or malformed.
        """
        if not self.data.val_files:
            return []
        with _naming("data.val_files"):
            dataset = self.build_dataset("val_files", dataset_name, **changes)
            rows = FirstRows(dataset, self.data.val_max_samples)
            size = min(self.data.val_batch_size or len(rows), len(rows))
            return list(build_loader(rows, size, False, self.trainer.seed, drop_last=False))

    def scorer(self) -> RewardScorer:
        """Return a scorer with the run's reward; it is closed with the run.

        Raises:
            ConfigError: the reward needs a judge, and the run has none.
        """
        scorer = RewardScorer(RewardSetup.of(self.reward, self.data.max_response_length), self.tokenizer)
        self._scorers.append(scorer)
        if scorer.uses_judge and self.has_reward_workers:
            raise ConfigError(
                f"placement.mapping.reward puts the rewards in a pool, but reward.name={self.reward.name} calls the "
                "judge from the trainer's process; remove the role reward from placement.mapping"
            )
        if scorer.uses_judge and self.judge is None:
            raise ConfigError(f"reward.name={self.reward.name} {NEEDS_JUDGE}")
        return scorer

    @property
    def has_reward_workers(self) -> bool:
        """True if rewards are computed in a pool of their own."""
        return self.replay_of is None and self.has_own_pool(Role.REWARD)

    def start_rewards(
        self, groups: Mapping[str, WorkerGroup], busy: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Connect the rewards to their workers, and start the judge if the run has one.

        Args:
            groups: groups that :meth:`start_roles` started.
            busy: returns a context manager that is entered while the judge generates a reply.

        Raises:
            WorkerError: a replica of the judge cannot be started.
        """
        if self.has_reward_workers:
            for scorer in self._scorers:
                scorer.score_by(RewardWorkers(groups[Role.REWARD]))
        if self.judge is not None and self._runtime is not None:
            loop = self._loop_of_replicas()
            self._judges.append(self.judge.start(groups[Role.JUDGE], self._runtime, loop, self._scorers, busy))

    def _loop_of_replicas(self) -> ReplicaLoop:
        if self._replica_loop is None:
            self._replica_loop = ReplicaLoop()
        return self._replica_loop

    def role_engine(self, section: str) -> Any:
        """Return ``<section>.engine`` as an instance of its engine's schema; the actor's engine if the role has
        none.
        """
        path = f"{section}.engine"
        if section == "actor" or not OmegaConf.select(self.config, path):
            return self.engine
        name = self._name_of(path)
        built = self.section(path, engines.get(name, requested_by=f"{path}.name").config_schema)
        if section == "ref" and name == self.engine.name and hasattr(built, "param_offload"):
            # ref.engine.param_offload is applied by the worker, not by the engine. The engine's own key must equal the
            # actor's, or the reference could not share the actor's workers.
            built = dataclasses.replace(built, param_offload=self.engine.param_offload)
        return built

    def worker_role(self, role: str) -> str:
        """Return the name in ``rollcast.roles`` of the worker class of a role."""
        return placed_as(role)

    def worker_setup(self, **parts: Any) -> WorkerSetup:
        """Return the setup of a role's workers; ``parts`` are the fields other than seed and token ids."""
        tokenizer = self.tokenizer
        return WorkerSetup(
            seed=self.trainer.seed,
            pad_token_id=int(tokenizer.pad_token_id),
            eos_token_id=int(tokenizer.eos_token_id),
            stop_token_ids=self.stop_token_ids,
            **parts,
        )

    def start_roles(self, workers: Mapping[str, ClassWithInitArgs[Any]]) -> dict[str, WorkerGroup]:
        """Start a group in each pool and build the models; roles of one pool share its processes.

        Raises:
            ResourceError: a pool cannot be placed.
            WorkerError: a worker or model cannot be built.
        """
        if self._runtime is None:
            raise RuntimeError("TaskRunner.start has to be called first, inside the context")
        chosen = dict(workers)
        with show_progress("starting workers"):
            fresh = self._restart_groups(chosen) if self.groups else None
            if fresh is None:
                fresh = self._start_groups(self._runtime, chosen)
        self._with_model -= fresh
        waiting = [
            role
            for role, worker in chosen.items()
            if role not in self._with_model and hasattr(worker.cls, "init_model")
        ]
        with show_progress("loading models", len(waiting)) as line:
            for role in waiting:
                line.update(note=role)
                self.groups[role].init_model()
                self._with_model.add(role)
                line.advance()
        return dict(self.groups)

    def _start_groups(self, runtime: Runtime, chosen: dict[str, ClassWithInitArgs[Any]]) -> set[str]:
        """Start the groups of a run, and return their roles."""
        self.emit("on_start_workers", workers=chosen, runtime=runtime)
        everyone: dict[Hashable, ClassWithInitArgs[Any]] = dict(chosen.items())
        logs = str((self.run_dir / "logs").resolve())
        if self.starts_replicas:
            served = self.rollout_model()
            everyone[Role.ROLLOUT] = self.served.worker(served, self.trainer.seed, self.placement.device, logs)
        if self.has_reward_workers:
            setup = RewardSetup.of(self.reward, self.data.max_response_length)
            model = RewardWorkerSetup(setup, self.model.path, self.model.trust_remote_code)
            everyone[Role.REWARD] = ClassWithInitArgs(RewardWorker, model)
        if self.judge is not None:
            everyone[Role.JUDGE] = self.judge.worker(self.trainer.seed, self.placement.device, logs)
        everyone = {role: worker.with_options(copies=self.copies.planned) for role, worker in everyone.items()}
        groups = start_groups(
            self.pools,
            everyone,
            runtime=runtime,
            timeout=self.runtime_config.call_timeout_s,
            launch_timeout=self.runtime_config.launch_timeout_s,
            env=hide_accelerators() if self.placement.device == "cpu" else None,
            threads=self.runtime_config.threads_per_worker,
        )
        self.groups = {str(role): group for role, group in groups.items()}
        return set(self.groups)

    def rollout_model(self) -> ServedModel:
        """Return the model that the rollout's replicas load at start."""
        return ServedModel.of(self.model.path, self.tokenizer, self.stop_token_ids, self.model.trust_remote_code)

    def _restart_groups(self, chosen: Mapping[str, ClassWithInitArgs[Any]]) -> set[str] | None:
        """Restart groups after a run has lost processes; return the roles whose processes are new.

        Groups that are alive and hold only frozen models are kept. Trained models go back to the checkpoint, and
        replicas may hold half an update, so their groups are restarted too.

        Returns:
            None if a group cannot be placed where it was; all groups are then shut down.
        """
        fresh: set[str] = set()
        views = {group.name: group for group in self.groups.values()}
        try:
            for name, group in views.items():
                roles = {role for role, view in self.groups.items() if view.name == name}
                is_frozen = all(
                    role in (Role.JUDGE, Role.REWARD) or (role in chosen and not role_trains(role)) for role in roles
                )
                if not is_frozen or group.lost_ranks or group.poisoned:
                    group.restart()
                    fresh |= roles
        except ResourceError as error:
            logger.warning("the workers cannot be restarted in place and are placed again: %s", error)
            for group in views.values():
                group.shutdown()
            self.groups = {}
            return None
        # Safe now: workers that were writing a checkpoint have ended.
        self.checkpoints.clean()
        return fresh

    @property
    def uses_replicas(self) -> bool:
        """True if the rollout runs in processes of its own."""
        sync: type[BaseWeightSync] = weight_syncs.get(self.rollout.weight_sync, requested_by="rollout.weight_sync")
        return not sync.capabilities.same_process

    @property
    def replay_of(self) -> Path | None:
        """Run directory whose recorded rollouts this run trains on (``trainer.replay``); None if it generates its
        own.
        """
        replay = getattr(self.trainer, "replay", None)
        return None if replay is None else Path(replay)

    @property
    def starts_replicas(self) -> bool:
        """True if this run starts replicas for the rollout."""
        return self.uses_replicas and self.replay_of is None

    @property
    def rollout_dtype(self) -> str | None:
        """Dtype in which replicas hold the weights; None if only their engine knows."""
        return self.rollout_class.weight_dtype(self.rollout, self.model.path, self.placement.device)

    def start_sampler(self, groups: Mapping[str, WorkerGroup]) -> Sampler:
        """Return a sampler that generates with the actor's weights on the groups of :meth:`start_roles`.

        Raises:
            WorkerError: a replica cannot be started.
        """
        actor = next(iter(groups.values()))
        if not self.uses_replicas or self._runtime is None:
            return InProcessSampler(actor, self.rollout.enable_rollout_routing_replay)
        replicas = self.served.start(groups[Role.ROLLOUT], self._runtime, self._loop_of_replicas())
        takes_turns = self.rollout.mode == RolloutMode.HYBRID.value
        sampler = ReplicaSampler(actor, replicas, self._canary(), takes_turns)
        self._samplers.append(sampler)
        return sampler

    def _canary(self) -> Canary:
        """Return a canary whose prompt is spread over the vocabulary; the tokens need no meaning."""
        size, count = len(self.tokenizer), min(_CANARY_PROMPT, self.data.max_prompt_length)
        sampling = SamplingParams(
            temperature=self.rollout.temperature or 1.0,
            max_tokens=min(self.rollout.canary.max_tokens, self.data.max_response_length),
            ignore_eos=True,
        )
        ids = [size * (place + 1) // (count + 1) for place in range(count)]
        actor = self.engine_class.compute_dtype(self.engine)
        rollout = self.rollout.quantization or self.rollout_dtype
        return Canary(ids, sampling, self.rollout.canary, actor, rollout)

    def emit(self, event: str, **values: Any) -> None:
        """Call a hook of all trackers and plugins."""
        getattr(self.hooks.hook, event)(**values)


def _tell_if_nothing_recorded(recorder: object) -> None:
    if isinstance(recorder, CallRecorder) and recorder.recorded is None:
        calls = recorder.describe_calls()
        logger.warning("runtime.record=%s recorded nothing; calls that were made: %s", recorder.wanted, calls)


@contextmanager
def _naming(key: str) -> Iterator[None]:
    """Prefix data errors of the block with the config key that they come from."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{key}: {error}") from error
