"""TaskRunner: everything a run stands on, started in order and stopped whatever happens."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig, OmegaConf

from rollcast.config.schemas import PlacementConfig, RuntimeConfig
from rollcast.config.validation import build_section
from rollcast.contracts.dataset import BaseDataset, datasets, preprocessors
from rollcast.contracts.engine import BaseEngine, ModelConfig, engines
from rollcast.contracts.rollout import BaseRollout, rollouts
from rollcast.contracts.tracker import BaseTracker, trackers
from rollcast.contracts.trainer import trainers
from rollcast.contracts.weight_sync import weight_syncs
from rollcast.controller.resource_pool import ResourcePoolManager
from rollcast.controller.runtime import Runtime, runtimes
from rollcast.controller.worker import ClassWithInitArgs
from rollcast.controller.worker_group import WorkerGroup
from rollcast.errors import CapabilityError, CheckpointError, ConfigError
from rollcast.plugins.manager import build_hook_manager
from rollcast_data.loader import EpochIterator, FirstRows, build_loader
from rollcast_data.schemas import DataConfig
from rollcast_data.tokenizer import load_tokenizer
from rollcast_rewards.schemas import RewardConfig
from rollcast_trainer.rewarding import RewardScorer
from rollcast_trainer.roles import Role
from rollcast_trainer.run_dir import Checkpoints, prepare_run_dir
from rollcast_trainer.schemas import ActorConfig, TrainerConfig
from rollcast_trainer.workers import ActorRolloutRefWorker, WorkerSetup

if TYPE_CHECKING:
    from pluggy import PluginManager
    from transformers import PreTrainedTokenizerBase

__all__ = ["TaskRunner"]

logger = logging.getLogger(__name__)


class TaskRunner:
    """What the trainers share: config sections, run directory, data, runtime, groups, trackers.

    Use it as a context manager; leaving it stops the workers and closes the trackers.

    Args:
        config: the composed config.
        trainer_schema: dataclass of the ``trainer`` section.
    """

    def __init__(self, config: DictConfig, trainer_schema: type[TrainerConfig] = TrainerConfig) -> None:
        self.config = config
        self.plain = cast("dict[str, Any]", OmegaConf.to_container(config))
        self.run_dir = Path(config.run_dir)
        self.trainer = self._section("trainer", trainer_schema)
        self.runtime_config = self._section("runtime", RuntimeConfig)
        self.placement = self._section("placement", PlacementConfig)
        self.model = self._section("model", ModelConfig)
        self.actor = self._section("actor", ActorConfig)
        self.data = self._section("data", DataConfig)
        self.reward = self._section("reward", RewardConfig)
        self.engine_class: type[BaseEngine] = engines.get(config.actor.engine.name)
        self.engine = self._section("actor.engine", self.engine_class.config_schema)
        self.rollout_class: type[BaseRollout] = rollouts.get(config.rollout.name)
        self.rollout: Any = self._section("rollout", self.rollout_class.config_schema)
        self._check_capabilities()
        self.start_step = 0
        self.checkpoints = Checkpoints(self.run_dir / "checkpoints", self.trainer.max_ckpt_to_keep)
        self._runtime: Runtime | None = None
        self._trackers: list[BaseTracker] = []
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self.hooks: PluginManager | None = None

    def _section(self, path: str, schema: type) -> Any:
        return build_section(schema, OmegaConf.select(self.config, path), path)

    def _check_capabilities(self) -> None:
        sync = weight_syncs.get(self.rollout.weight_sync)
        names = f"actor.engine.name={self.engine.name}, rollout.name={self.rollout.name}, rollout.weight_sync={self.rollout.weight_sync}"
        if sync.capabilities.same_process and not (
            self.rollout_class.capabilities.in_process and self.engine_class.capabilities.in_process_module
        ):
            lacking = "rollout" if not self.rollout_class.capabilities.in_process else "engine"
            raise CapabilityError(f"{names}: this sync shares the engine's module, which the {lacking} cannot do")
        modes = {mode.value for mode in self.rollout_class.capabilities.modes}
        if self.rollout.mode not in modes:
            raise CapabilityError(
                f"rollout.mode={self.rollout.mode}: {self.rollout.name} can do {', '.join(sorted(modes))}"
            )

    # -- start and stop -----------------------------------------------------------------------

    def __enter__(self) -> TaskRunner:
        try:
            self.hooks = build_hook_manager()
            self.hooks.hook.on_configure(config=self.config)
            self.start_step = prepare_run_dir(self.run_dir, self.plain, self.trainer.resume_mode)
            self._write_config()
            self._prepare_data()
            self._start_runtime()
            self._warm_start()
            self._start_trackers()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for tracker in self._trackers:
            tracker.close()
        self._trackers = []
        if self._runtime is not None:
            self._runtime.shutdown()
            self._runtime = None

    def _write_config(self) -> None:
        file = self.run_dir / "config.yaml"
        try:
            with tempfile.NamedTemporaryFile("w", dir=self.run_dir, suffix=".yaml", delete=False) as temporary:
                temporary.write(OmegaConf.to_yaml(self.config))
            os.replace(temporary.name, file)
        except OSError as error:
            raise CheckpointError(f"cannot write {file}: {error}") from error

    def _prepare_data(self) -> None:
        if self.data.preprocess is None:
            return
        if self.data.preprocess_dir is None:
            raise ConfigError(
                f"data.preprocess={self.data.preprocess} needs data.preprocess_dir, the folder to write into"
            )
        output = Path(self.data.preprocess_dir)
        if all(Path(file).exists() for file in [*self.data.train_files, *self.data.val_files]):
            return
        source = None if self.data.preprocess_source is None else Path(self.data.preprocess_source)
        preprocessor = preprocessors.get(self.data.preprocess, requested_by="data.preprocess")()
        report = preprocessor.run(source, output, self.trainer.seed)
        logger.info(
            "%s wrote %s",
            self.data.preprocess,
            ", ".join(f"{rows} rows of {name}" for name, rows in report.rows.items()),
        )

    def _start_runtime(self) -> None:
        settings = self.runtime_config
        runtime_class = runtimes.get(settings.name)
        processes = self.placement.nnodes * self.placement.n_gpus_per_node
        if settings.name == "local":
            options: dict[str, Any] = {"num_cpus": settings.num_cpus}
        else:
            options = {
                "address": settings.address,
                "num_cpus": settings.num_cpus or max(os.cpu_count() or 1, processes),
                "object_store_memory": settings.object_store_memory,
                "log_to_driver": settings.log_to_driver,
            }
        self._runtime = runtime_class(**options)
        self._pools().check(self._runtime.nodes())

    def _warm_start(self) -> None:
        """Train the warm-start recipe first, unless its exported model is there already."""
        recipe = self.trainer.warm_start
        if recipe is None:
            return
        from rollcast.config import compose

        folder = self.run_dir / "warm_start"
        exported = folder / "export"
        if not (exported / "config.json").exists():
            inner = compose(
                [f"recipe={recipe}", f"run_dir={folder}", f"trainer.seed={self.trainer.seed}", "trainer.export=true"]
            )
            for section in ("runtime", "placement"):
                inner.config[section] = self.config[section]
            logger.info("warm start: training recipe %s in %s", recipe, folder)
            trainers.get(inner.config.trainer.name).launch(inner.config)
        self.model.path = str(exported)
        self.model.random_init = False

    def _start_trackers(self) -> None:
        if self.hooks is None:
            raise RuntimeError("TaskRunner is used outside its context")
        for name in self.config.trackers:
            tracker = trackers.get(name)(self.run_dir, self.plain, self.start_step)
            self._trackers.append(tracker)
            self.hooks.register(tracker, name=f"tracker:{name}")

    # -- what a trainer builds its loop from --------------------------------------------------

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.model.path, self.model.trust_remote_code)
        return self._tokenizer

    def build_dataset(self, files: list[str], name: str, **changes: Any) -> BaseDataset:
        """A dataset over ``files`` with the config's settings and some changed."""
        settings = {**cast("dict[str, Any]", OmegaConf.to_container(self.config.data)), **changes}
        dataset_class = cast("Any", datasets.get(name))
        return cast("BaseDataset", dataset_class(files, self.tokenizer, settings))

    def train_batches(self) -> EpochIterator:
        """Endless training batches of ``data.train_batch_size`` rows."""
        if not self.data.train_files:
            raise ConfigError("data.train_files is empty; give at least one JSONL or Parquet file")
        dataset = self.build_dataset(self.data.train_files, self.data.dataset)
        return EpochIterator(
            build_loader(
                dataset, self.data.train_batch_size, self.data.shuffle, self.trainer.seed, True, self.data.num_workers
            )
        )

    def val_batches(self, **changes: Any) -> Any:
        """One pass over the validation prompts as a list of batches; empty without ``data.val_files``."""
        if not self.data.val_files:
            return []
        dataset = self.build_dataset(self.data.val_files, "prompts", **changes)
        if 0 <= self.data.val_max_samples < len(dataset):
            dataset = FirstRows(dataset, self.data.val_max_samples)
        size = self.data.val_batch_size or len(dataset)
        return list(build_loader(dataset, min(size, len(dataset)), False, self.trainer.seed, drop_last=False))

    def scorer(self) -> RewardScorer:
        """The run's reward."""
        return RewardScorer(self.reward.name, self.reward.reward_manager, self.reward.reward_kwargs, self.tokenizer)

    def worker_setup(self, **parts: Any) -> WorkerSetup:
        """The workers' setup; ``parts`` are the fields that the trainer decides."""
        tokenizer = self.tokenizer
        return WorkerSetup(
            model=self.model,
            engine=self.engine,
            optim=self.actor.optim,
            rollout=self.rollout,
            seed=self.trainer.seed,
            pad_token_id=int(tokenizer.pad_token_id),
            eos_token_id=int(tokenizer.eos_token_id),
            **parts,
        )

    def _pools(self) -> ResourcePoolManager:
        import torch

        device = self.placement.device
        if device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"placement.device is {device!r}; valid: auto, cpu, cuda")
        use_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        counts = [self.placement.n_gpus_per_node] * self.placement.nnodes
        return ResourcePoolManager({"global_pool": counts}, dict.fromkeys(Role, "global_pool"), use_gpu)

    def start_actor(self, role: Role, setup: WorkerSetup) -> WorkerGroup:
        """Start the actor's group and build its model."""
        if self._runtime is None:
            raise RuntimeError("TaskRunner is used outside its context")
        group = WorkerGroup(
            self._pools().get_resource_pool(role),
            {role.value: ClassWithInitArgs(ActorRolloutRefWorker, setup)},
            runtime=self._runtime,
            name="policy",
            timeout=self.runtime_config.call_timeout_s,
            launch_timeout=self.runtime_config.launch_timeout_s,
            threads=self.runtime_config.threads_per_worker,
        )
        group.init_model()
        return group

    def emit(self, event: str, **values: Any) -> None:
        """Call a hook of every tracker and plugin."""
        if self.hooks is not None:
            getattr(self.hooks.hook, event)(**values)

    @property
    def world_size(self) -> int:
        """Worker processes."""
        return self.placement.nnodes * self.placement.n_gpus_per_node


def total_steps(trainer: TrainerConfig, batches_per_epoch: int) -> int:
    """Steps of the run."""
    steps = trainer.total_steps if trainer.total_steps is not None else trainer.total_epochs * batches_per_epoch
    if steps < 1:
        raise ConfigError(f"trainer.total_steps is {steps}; it must be at least 1")
    return steps


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as Python floats."""
    return {key: float(value) for key, value in metrics.items()}
