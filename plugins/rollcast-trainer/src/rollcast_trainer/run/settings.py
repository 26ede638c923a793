"""RunSettings: the configuration of a run, checked, with all that it chooses; nothing is started for it."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from omegaconf import DictConfig, OmegaConf

from rollcast import ResourcePoolManager, build_section
from rollcast.contracts.command import show_progress
from rollcast.contracts.engine import BaseEngine, ModelConfig, engines
from rollcast.contracts.hooks import build_hook_manager
from rollcast.contracts.rollout import BaseRollout, rollouts
from rollcast.contracts.runtime import Runtime, runtimes
from rollcast.contracts.sections import PlacementConfig
from rollcast.contracts.storage import NodeCopies
from rollcast.contracts.trainer import BaseTrainer, trainers
from rollcast.errors import ConfigError
from rollcast.protocol import DataProto
from rollcast_data.schemas import DataConfig
from rollcast_data.tokenizer import load_tokenizer, read_stop_token_ids
from rollcast_rewards.schemas import RewardConfig
from rollcast_serving.adapters import take_adapters
from rollcast_serving.command_judge import CommandJudge
from rollcast_serving.contracts.weight_sync import BaseWeightSync, weight_syncs
from rollcast_serving.engines.arguments import check_device_arguments
from rollcast_serving.negotiation import Choice, check_choice, check_places, check_quantization, check_world_sizes
from rollcast_serving.pools import build_pools
from rollcast_serving.requests import check_sampling, configured_sampling
from rollcast_serving.schemas import JudgeConfig
from rollcast_serving.served import ServedModel, ServedRole
from rollcast_serving.shapes import ReplicaShape
from rollcast_trainer.batch.sizes import BatchAlgebra, ParallelSizes, data_parallel_size, pass_tokens
from rollcast_trainer.run.data import val_batches
from rollcast_trainer.run.goal import Goal
from rollcast_trainer.run.replay import RolloutRecord
from rollcast_trainer.run.supply import Place
from rollcast_trainer.schemas import RunConfig
from rollcast_trainer.workers.roles import Role

if TYPE_CHECKING:
    from pluggy import PluginManager
    from transformers import PreTrainedTokenizerBase

__all__ = ["RunSettings", "StagedTrainer", "check_run"]


class StagedTrainer(BaseTrainer):
    """A trainer whose step is a list of stages, which is known from the configuration alone."""

    #: Schema of the trainer's sections.
    schema: ClassVar[type[RunConfig]] = RunConfig
    #: True if the trainer reads ``trainer_kwargs``.
    takes_kwargs: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def list_stages(cls, settings: RunSettings) -> list[Place]:
        """Return the stages of a step in order.

        Raises:
            RollcastError: the configuration cannot work.
        """

    @classmethod
    def algebra(cls, settings: RunSettings) -> BatchAlgebra:
        """Return the sizes of a step; by default those of one optimizer step on one row of each prompt."""
        actor, rows = settings.actor, settings.data.train_batch_size
        ranks = data_parallel_size(settings.engine, settings.world_size)
        tokens = pass_tokens(actor, settings.engine)
        return BatchAlgebra(rows, 1, rows, 1, ranks, actor.ppo_micro_batch_size_per_gpu, tokens)

    @classmethod
    def val_batches(cls, settings: RunSettings) -> list[DataProto]:
        """Return the validation prompts, collated; empty without ``data.val_files``."""
        return val_batches(settings, settings.data.dataset)


@dataclass(frozen=True)
class RunSettings:
    """The configuration of a run: typed sections, the plugins that they name, pools and stages.

    Attributes:
        config: the composed configuration.
        trainer_class: class of the trainer.
        trainer, model, actor: sections of the trainer's schema; ``trainer`` and ``actor`` are untyped, because each
            trainer brings its own.
        data, reward, placement, runtime: further sections.
        runtime_class, engine_class, rollout_class: plugins of ``runtime``, ``actor.engine`` and ``rollout``.
        engine, rollout: sections ``actor.engine`` and ``rollout``, instances of the plugins' schemas.
        judge: replicas of the judge model that rewards call; None in a run without a judge.
        pools: resource pools, and the pool of each role.
        copies: copies of remote models on the nodes of the run.
        hooks: listeners of the run's events.
        places: stages of a step in order.
    """

    config: DictConfig
    trainer_class: type[StagedTrainer]
    trainer: Any
    model: ModelConfig
    actor: Any
    data: DataConfig
    reward: RewardConfig
    placement: PlacementConfig
    runtime_class: type[Runtime]
    runtime: Any
    engine_class: type[BaseEngine]
    engine: Any
    rollout_class: type[BaseRollout]
    rollout: Any
    judge: CommandJudge | None
    pools: ResourcePoolManager
    copies: NodeCopies
    hooks: PluginManager
    places: tuple[Place, ...] = ()

    # -- sections -----------------------------------------------------------------------------

    @property
    def plain(self) -> dict[str, Any]:
        """The composed configuration as nested dicts."""
        return cast("dict[str, Any]", OmegaConf.to_container(self.config))

    @property
    def run_dir(self) -> Path:
        """Directory of the run."""
        return Path(self.config.run_dir)

    def section(self, path: str, schema: type) -> Any:
        """Return a section of the configuration as an instance of its dataclass.

        Raises:
            ConfigError: a value has the wrong type.
        """
        return _read_section(self.config, self.copies, path, schema)

    def reread(self) -> Self:
        """Return the settings with the trainer's sections read again.

        A model folder that did not exist before may have to be converted, or its configuration has changed.
        """
        return dataclasses.replace(self, **_trainer_sections(self.config, self.trainer_class.schema, self.copies))

    def role_engine(self, section: str) -> Any:
        """Return ``<section>.engine`` as an instance of its engine's schema; the actor's engine if the role has
        none.
        """
        path = f"{section}.engine"
        if section == "actor" or not OmegaConf.select(self.config, path):
            return self.engine
        name = _name_of(self.config, path)
        built = self.section(path, engines.get(name, requested_by=f"{path}.name").config_schema)
        if section == "ref" and name == self.engine.name and hasattr(built, "param_offload"):
            # ref.engine.param_offload is applied by the worker, not by the engine. The engine's own key must equal the
            # actor's, or the reference could not share the actor's workers.
            built = dataclasses.replace(built, param_offload=self.engine.param_offload)
        return built

    @cached_property
    def algebra(self) -> BatchAlgebra:
        """Sizes of a step."""
        return self.trainer_class.algebra(self)

    # -- pools and roles ----------------------------------------------------------------------

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

    @property
    def has_reward_workers(self) -> bool:
        """True if rewards are computed in a pool of their own."""
        return self.replay_of is None and self.has_own_pool(Role.REWARD)

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """Roles that the stages call, the actor's first."""
        called = [str(role) for place in self.places for role in place.spec.roles]
        return tuple(dict.fromkeys([str(Role.ACTOR_ROLLOUT), *called]))

    @cached_property
    def columns_read(self) -> frozenset[str]:
        """Columns that the stages read."""
        return frozenset(name for place in self.places for name in (*place.spec.reads, *place.spec.optional))

    def is_read(self, column: str) -> bool:
        """Return True if a stage reads a column; a name that ends with ``/`` is a prefix."""
        return any(name == column or (column.endswith("/") and name.startswith(column)) for name in self.columns_read)

    # -- rollout and model --------------------------------------------------------------------

    @property
    def max_staleness(self) -> int:
        """Steps by which rollouts may start ahead of the step that trains on them; 0 alternates generation and
        training.
        """
        staleness: int = getattr(self.trainer, "max_staleness", 0)
        return staleness

    @property
    def replay_of(self) -> Path | None:
        """Run directory whose recorded rollouts this run trains on (``trainer.replay``); None if it generates its
        own.
        """
        replay = getattr(self.trainer, "replay", None)
        return None if replay is None else Path(replay)

    @property
    def records_rollouts(self) -> bool:
        """True if the run writes its rollouts for replays."""
        return self.replay_of is None and bool(self.runtime.record_trajectories)

    @property
    def uses_replicas(self) -> bool:
        """True if the rollout runs in processes of its own."""
        sync: type[BaseWeightSync] = weight_syncs.get(self.rollout.weight_sync, requested_by="rollout.weight_sync")
        return not sync.capabilities.same_process

    @property
    def starts_replicas(self) -> bool:
        """True if this run starts replicas for the rollout."""
        return self.uses_replicas and self.replay_of is None

    @property
    def rollout_dtype(self) -> str | None:
        """Dtype in which replicas hold the weights; None if only their engine knows."""
        return self.rollout_class.weight_dtype(self.rollout, self.model.path, self.placement.device)

    @cached_property
    def served(self) -> ServedRole:
        """The role of the rollout's replicas."""
        return ServedRole(Role.ROLLOUT, "rollout", self.rollout, self.rollout_class)

    @property
    def served_model(self) -> ServedModel:
        """The model that the rollout's replicas load at start."""
        model = self.model
        return ServedModel.of(model.path, self.tokenizer, self.stop_token_ids, model.trust_remote_code)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer of the model."""
        return load_tokenizer(self.model.path, self.model.trust_remote_code)

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Token ids that end every response: the tokenizer's EOS, then the ids in the model's
        generation_config.json.
        """
        return read_stop_token_ids(self.model.path, self.tokenizer)


def check_run(config: DictConfig, trainer_class: type[StagedTrainer] | None = None) -> RunSettings:
    """Return the settings of a run. Nothing is started or written; remote models are copied to this node.

    Args:
        config: the composed configuration; its plugins are loaded.
        trainer_class: class of the trainer; None for the one that ``trainer.name`` names.

    Raises:
        ConfigError: a section has a wrong value, or ``trainer.name`` names a trainer without a list of stages.
        PluginError: a plugin does not exist or does not load.
        CapabilityError: engine, rollout and weight sync cannot work together.
    """
    settings = _read(config, trainer_class or _find_trainer(config))
    check_device_arguments(settings.rollout)
    _check_rollout(settings)
    if settings.replay_of is not None:
        _leave_out_replicas(settings.pools)
    settings.hooks.hook.on_configure(config=config)
    _check_trainer(settings)
    if settings.copies.planned:
        with show_progress("copying models"):  # stages look at the models of their roles
            settings.copies.make()
    settings = dataclasses.replace(settings, places=tuple(settings.trainer_class.list_stages(settings)))
    if settings.records_rollouts and not any(place.spec.is_recorded for place in settings.places):
        raise ConfigError(
            f"runtime.record_trajectories records rollouts, but trainer={settings.trainer.name} makes none; remove the "
            "key"
        )
    return settings


def _find_trainer(config: DictConfig) -> type[StagedTrainer]:
    name = config.trainer.name
    trainer_class = trainers.get(name)
    if not issubclass(trainer_class, StagedTrainer):
        raise ConfigError(
            f"trainer.name={name} is not a trainer of rollcast-trainer, so its stages are unknown before it "
            "runs; choose one that is, such as ppo"
        )
    return trainer_class


def _read_section(config: DictConfig, copies: NodeCopies, path: str, schema: type) -> Any:
    return copies.place(build_section(schema, OmegaConf.select(config, path), path), path)


def _trainer_sections(config: DictConfig, schema: type[RunConfig], copies: NodeCopies) -> dict[str, Any]:
    sections: Any = copies.place(build_section(cast("type[Any]", schema), config))
    return {"trainer": sections.trainer, "model": sections.model, "actor": sections.actor}


def _name_of(config: DictConfig, path: str) -> str:
    name = OmegaConf.select(config, f"{path}.name")
    if name is None:
        group = path.rpartition(".")[2]
        raise ConfigError(f"{path}.name is not set; choose one with {group}=...")
    return str(name)


def _read(config: DictConfig, trainer_class: type[StagedTrainer]) -> RunSettings:
    """Return the settings without stages; the sections are checked one by one, not yet together."""
    copies = NodeCopies()

    def section(path: str, schema: type) -> Any:
        return _read_section(config, copies, path, schema)

    sections = _trainer_sections(config, trainer_class.schema, copies)
    runtime_class: type[Runtime] = runtimes.get(_name_of(config, "runtime"), requested_by="runtime.name")
    runtime, placement = section("runtime", runtime_class.config_schema), section("placement", PlacementConfig)
    data, reward = section("data", DataConfig), section("reward", RewardConfig)
    engine_class: type[BaseEngine] = engines.get(_name_of(config, "actor.engine"))
    engine = section("actor.engine", engine_class.config_schema)
    rollout_class: type[BaseRollout] = rollouts.get(_name_of(config, "rollout"))
    rollout = take_adapters(section("rollout", rollout_class.config_schema), sections["model"])
    pools = build_pools(placement)
    pools.mapping[Role.ACTOR_ROLLOUT_REF] = pools.mapping[Role.ACTOR_ROLLOUT]
    judge = None
    if getattr(sections["trainer"], "replay", None) is None:
        places = pools.get_resource_pool(Role.JUDGE).process_on_nodes
        judge = CommandJudge.of(section("judge", JudgeConfig), places)
    return RunSettings(
        config=config,
        trainer_class=trainer_class,
        **sections,
        data=data,
        reward=reward,
        placement=placement,
        runtime_class=runtime_class,
        runtime=runtime,
        engine_class=engine_class,
        engine=engine,
        rollout_class=rollout_class,
        rollout=rollout,
        judge=judge,
        pools=pools,
        copies=copies,
        hooks=build_hook_manager(without=config.disabled_hooks),
    )


def _check_rollout(settings: RunSettings) -> None:
    """Check that engine, rollout, weight sync and pools work together.

    Raises:
        ConfigError: a key of the rollout is not valid.
        CapabilityError: they cannot work together; the message names the keys.
    """
    rollout, pool = settings.rollout, settings.pools.get_resource_pool(Role.ROLLOUT)
    names = (settings.engine.name, rollout.name, rollout.mode, rollout.weight_sync)
    choice = Choice(*names, ReplicaShape.of(rollout), settings.model.trains_adapter, rollout.update_in_flight)
    check_choice(choice, settings.engine_class, settings.rollout_class)
    check_quantization(rollout, settings.rollout_class)
    capabilities = settings.rollout_class.capabilities
    for key, validation in (("rollout", False), ("rollout.val_kwargs", True)):
        check_sampling(key, configured_sampling(rollout, 1, validation), capabilities)
    own_pool, processes = settings.has_own_pool(Role.ROLLOUT), pool.process_on_nodes
    check_places(choice, not settings.uses_replicas, own_pool, processes, pool.use_gpu, capabilities.multi_node)
    check_world_sizes(choice, settings.engine_class.capabilities, capabilities, settings.world_size, pool.world_size)


def _leave_out_replicas(pools: ResourcePoolManager) -> None:
    """Remove the pool of replicas: a replay starts none."""
    own = pools.mapping[Role.ROLLOUT]
    pools.mapping[Role.ROLLOUT] = pools.mapping[Role.ACTOR_ROLLOUT]
    if own not in pools.mapping.values():
        del pools.resource_pool_dict[own]


def _check_trainer(settings: RunSettings) -> None:
    """Check the trainer's own keys.

    Raises:
        ConfigError: a key is not valid, or the recorded run of a replay has other settings.
    """
    free = settings.config.get("trainer_kwargs")
    if free and not settings.trainer_class.takes_kwargs:
        raise ConfigError(
            f"trainer_kwargs.{next(iter(free))} is set, but trainer={settings.trainer.name} takes no free options; its "
            "keys are those of the section trainer"
        )
    settings.algebra.check()
    settings.trainer.check()
    longest = settings.data.max_prompt_length + settings.data.max_response_length
    settings.actor.check(longest, ParallelSizes.read(settings.engine).context)
    if settings.replay_of is None:
        Goal(settings.trainer.stop_at).check_files(settings.data.val_files)
    else:
        RolloutRecord(settings.replay_of).check_config(settings.plain)
