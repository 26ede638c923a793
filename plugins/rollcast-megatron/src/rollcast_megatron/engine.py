"""The Megatron engine: a decoder of megatron-core, split over a mesh of ranks, behind rollcast's contract."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from rollcast.contracts.engine import EngineCapabilities, EngineSetup
from rollcast.contracts.rollout import ROUTED_EXPERTS
from rollcast.contracts.worker import WorkerContext
from rollcast.errors import CapabilityError, CheckpointError, ConfigError
from rollcast.protocol import DataProto
from rollcast_engine.base import TorchEngine
from rollcast_engine.batching import check_budget, plan_batch
from rollcast_engine.checkpoint_files import read_summary
from rollcast_engine.export import write_folder
from rollcast_engine.hf import load_hf_config
from rollcast_engine.keys import naming_keys
from rollcast_engine.lora import require_adapter, write_adapter
from rollcast_engine.loss import quantity_names
from rollcast_engine.reduce import MetricSums, agree_on_counts
from rollcast_engine.routing import check_replay, start_record
from rollcast_engine.transfer import CopyStream
from rollcast_megatron.build import DTYPES, Plan, build_model, check_attention, check_model
from rollcast_megatron.checkpoint import EngineState
from rollcast_megatron.export import whole_module
from rollcast_megatron.inputs import RowLayout
from rollcast_megatron.layout import Mesh, join_mesh
from rollcast_megatron.lora import adapt_stage, plan_adapter
from rollcast_megatron.maps import find_map
from rollcast_megatron.offload import StageMemory
from rollcast_megatron.overlap import complete_weights, gather_before_use, reduce_in_backward
from rollcast_megatron.schemas import MegatronConfig
from rollcast_megatron.step import Pass, run_pass
from rollcast_megatron.weights import Shapes, gather, hf_shapes, load_folder, load_random, open_folder

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rollcast.contracts.engine import (
        BaseEngine,
        ForwardSettings,
        LossFunction,
        ModelConfig,
        ModelType,
        OptimConfig,
        TrainOutput,
    )
    from rollcast.contracts.weights import AdapterWeights
    from rollcast_engine.routing import RouterTape
    from rollcast_engine.weights import WeightFolder
    from rollcast_megatron.lora import AdapterPlan
    from rollcast_megatron.module import Stage
    from rollcast_megatron.optimizer import StageOptimizer

__all__ = ["MegatronEngine"]

log = logging.getLogger(__name__)


class MegatronEngine(TorchEngine):
    """An engine with tensor, pipeline, data and sequence parallelism, for models in ``rollcast.megatron_models``.

    The gradient is that of the sum of the loss function's shares over all micro-batches and ranks. It is reduced over
    the data-parallel ranks when the optimizer steps.

    Raises:
        ConfigError: a key of the engine or optimizer has an invalid value, or the mesh does not fit the ranks.
        CapabilityError: the model's keys ask for Liger's kernels.
    """

    capabilities: ClassVar[EngineCapabilities] = EngineCapabilities(
        value_model=True,
        sum_pi_squared=True,
        vocabulary_kl=True,
        in_process_module=True,
        token_budget=True,
        lora=True,
        offload=True,
        routing_replay=True,
        tensor_parallel=True,
        pipeline_parallel=True,
    )
    config_schema: ClassVar[type] = MegatronConfig

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        if not isinstance(setup.engine, MegatronConfig):
            raise ConfigError(f"the megatron engine needs a MegatronConfig, not a {type(setup.engine).__name__}")
        self.config: MegatronConfig = setup.engine
        self.config.check(setup.context.world_size, f"{setup.section}.engine")
        if setup.model.use_liger:
            raise CapabilityError("the megatron engine does not support Liger's kernels; set model.use_liger to false")
        if setup.optim is not None:
            _check_adamw(setup.optim)
        self.mesh: Mesh
        self.plan: Plan
        self.shapes: Shapes
        #: This rank's stage, and the modules that pipeline schedules run: its chunks, or the wrappers that reduce their
        #: gradients.
        self.stage: Stage
        self.runners: list[nn.Module] = []
        self._copies = CopyStream(self.device)
        self.memory = StageMemory(self.runners, self._copies)
        #: False if the model computes in host memory.
        self.can_offload = False
        #: Modes that are entered, the outermost first: True for train mode.
        self._modes: list[bool] = []
        self.optimizer: StageOptimizer | None = None
        self._reference: MegatronEngine | None = None
        self._whole: nn.Module | None = None
        #: True during a call that takes an optimizer step on the gradients of one batch.
        self._steps_next = False
        #: Distribution of the adapter that is trained instead of the model; None without one.
        self.adapter: AdapterPlan | None = None
        #: Routers of the stage; None if the model has no experts.
        self.tape: RouterTape | None = None

    @classmethod
    def compute_dtype(cls, config: MegatronConfig) -> str:
        return config.dtype

    def initialize(self) -> None:
        """Join the mesh, load this rank's part of the model, and build the optimizer.

        Raises:
            ConfigError: the model folder cannot be used, or the model cannot be split as the keys say.
        """
        setup, context = self.setup, self.setup.context
        self.use_local_device()
        model_map = find_map(load_hf_config(setup.model))
        with naming_keys(setup.section):
            layers = check_model(model_map, self.config)
            check_attention(self.config)
        self.shapes = hf_shapes(setup.model, setup.model_type)
        folder = None if setup.model.random_init else open_folder(Path(setup.model.path))
        self.mesh = join_mesh(self, self.config, context, setup.seed)
        self.plan = Plan(model_map, self.mesh, setup.model_type == "value_model", layers, self.config.chunks)
        self.stage = build_model(self.plan, self.config, self.device)
        self.tape = self._build_tape()
        parameters = dict(self.stage.named_parameters())
        if folder is not None:
            load_folder(self.plan, parameters, self.shapes, folder)
        else:
            load_random(self.plan, parameters, self.shapes, setup.seed, model_map.transformer["init_method_std"])
        self._attach_adapter(folder)
        self.runners = list(self.stage.eval().chunks)
        if setup.optim is not None:
            self._build_optimizer()
        self._copies = CopyStream(self.device)
        self.memory = StageMemory(self.runners, self._copies)
        self.can_offload = self.device.type != "cpu"
        if self.can_offload:
            self.memory.free_gradients()  # a run generates before it trains
        self._offload()

    def _attach_adapter(self, folder: WeightFolder | None) -> None:
        setup = self.setup
        if not setup.model.trains_adapter:
            return
        self.adapter = plan_adapter(self.plan, setup.model, setup.seed)
        if folder is not None:
            self.adapter.adapter.base_fingerprint = folder.fingerprint()
        adapt_stage(self.stage, self.adapter, self.device)

    def _build_tape(self) -> RouterTape | None:
        mixture, config = self.plan.map.mixture, self.config
        if mixture is None:
            return None
        from rollcast_megatron.router import attach_tape

        return attach_tape(self.stage, mixture, self.mesh, config.router_aux_loss_coef, config.sequence_parallel)

    def _build_optimizer(self) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        from rollcast_megatron.optimizer import StageOptimizer

        # With a single rank per part of the model there is nothing to distribute or to exchange.
        shared = self.mesh.data_size * self.mesh.context_size > 1
        distributed = self.config.use_distributed_optimizer and shared
        options = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=distributed,
            overlap_grad_reduce=self.config.overlap_grad_reduce and shared,
            # An adapter's matrices are read outside their module's forward pass, and are small.
            overlap_param_gather=self.config.overlap_param_gather and distributed and self.adapter is None,
        )
        # Only the first chunk is reduced at the end of the backward pass, where nothing else hides the exchange.
        self.runners = [
            DistributedDataParallel(self.stage.config, options, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(self.stage.chunks)
        ]
        if options.overlap_param_gather:
            gather_before_use(self.runners, self.stage)
        # An adapter is float32, and has no float32 copies; a value head has the dtype of the model.
        only_adapter = self.adapter is not None and not self.plan.is_value_model
        dtype = torch.float32 if only_adapter else DTYPES[self.config.dtype]
        self.optimizer = StageOptimizer(self.runners, self.optim, distributed, dtype)

    @contextmanager
    def mode(self, training: bool) -> Iterator[None]:
        """Enter train or eval mode with the weights on the device.

        On an accelerator, leaving train mode drops the gradients and frees their memory, so that a rollout finds it.
        The outermost mode moves offloaded state: an update with many mini-batches moves it once each way.
        """
        was_training = self.stage.training
        self._load(model=self.config.param_offload)
        if training and not any(self._modes) and self.can_offload:
            self.memory.zero_gradients()
        self._modes.append(training)
        self._train(training)
        try:
            yield
            # Not after an error, which other ranks may not have: they would not gather.
            complete_weights(self.runners)
        finally:
            self._train(was_training)
            self._modes.pop()
            if training and not any(self._modes) and self.can_offload:
                self._drop_gradients()
            if not self._modes:
                self._offload()

    def _train(self, training: bool) -> None:
        self.stage.train(training)
        for runner in self.runners:
            runner.train(training)

    def optimizer_zero_grad(self) -> None:
        """Drop all gradients."""
        self.require_optimizer(self.optimizer).zero_grad()
        self.memory.zero_gradients()

    def optimizer_step(self) -> tuple[float, bool]:
        """Reduce the gradients over the ranks, clip to ``optim.clip_grad`` and step.

        If the norm is not finite, the step is skipped and the gradients are dropped.

        Returns:
            The norm before clipping, and True if the step was skipped.
        """
        optimizer = self.require_optimizer(self.optimizer)
        # Before the norm, for which megatron-core copies gradients to the float32 weights.
        self._load(optimizer=self.config.optimizer_offload)
        norm = optimizer.gradient_norm()
        is_finite = math.isfinite(norm)
        if is_finite:
            optimizer.step(norm, self.current_lr())
            self._whole = None
        else:
            log.warning("the gradient's norm is %s: the optimizer step is skipped", norm)
            self.optimizer_zero_grad()
        if not self._modes:
            self._offload()
        return norm, not is_finite

    def train_batch(self, data: DataProto, loss_function: LossFunction, settings: ForwardSettings) -> TrainOutput:
        """Take one optimizer step on this rank's rows of a mini-batch."""
        self._steps_next = True
        try:
            return super().train_batch(data, loss_function, settings)
        finally:
            self._steps_next = False

    def forward_backward_batch(
        self,
        data: DataProto,
        loss_function: LossFunction | None,
        settings: ForwardSettings,
        forward_only: bool = False,
    ) -> tuple[DataProto | None, dict[str, float]]:
        """Run the micro-batches; see :meth:`rollcast.contracts.engine.BaseEngine.forward_backward_batch`.

        All ranks of a copy of the model receive the same rows, and all of them return the outputs and metrics.

        Raises:
            ConfigError: a row of any rank does not fit the token budget; every rank raises.
            TypeError: training without a loss function.
        """
        if not forward_only and loss_function is None:
            raise TypeError("forward_backward_batch needs a loss_function unless forward_only=True")
        check_replay(data, self.tape)
        plan = plan_batch(data, settings, self.config.use_remove_padding, self.mesh.context_size)
        agreed = agree_on_counts(plan, settings, self.get_data_parallel_group(), self.device)
        check_budget(agreed.longest, settings, self.mesh.context_size)
        reference = self._reference_for(settings)
        record = start_record(settings, plan.source, self.tape, self.device)
        work = Pass(
            plan=plan,
            model_plan=self.plan,
            denominators=agreed.denominators,
            loss_function=loss_function,
            settings=settings,
            head_chunk=self.config.head_chunk_size,
            copies=self._copies,
            layout=self._row_layout(),
            reference=None if reference is None else reference.stage,
            reference_mode=self._as_base() if reference is self else nullcontext(),
            sums=MetricSums(),
            tape=self.tape,
            record=record,
            is_sequence_parallel=self.config.sequence_parallel,
            # Ranks that share experts exchange tokens in each micro-batch.
            micro_batches=self._count_passes(
                agreed.micro_batches if self.mesh.expert_size > 1 else len(plan), reference
            ),
        )
        names = quantity_names(settings, self.plan.is_value_model) if forward_only else []
        routing = nullcontext() if self.tape is None else self.tape.batch(self.device)
        with (
            routing,
            self._reducing(forward_only),
            torch.set_grad_enabled(not forward_only),
            nullcontext() if reference is None or reference is self else reference.mode(False),
        ):
            outputs = run_pass(self.runners, work, names, forward_only)
        metrics = self._reduce_metrics(work.sums)
        if not forward_only:
            return None, metrics | self._router_metrics()
        batch = plan.source.as_batch(outputs)
        if record is not None:
            batch = batch.with_columns({ROUTED_EXPERTS: record.column(self._router_groups())})
        return batch, metrics

    def _reduce_metrics(self, sums: MetricSums) -> dict[str, float]:
        """Return the metrics of all ranks, which the last stage sums, on every stage."""
        metrics: list[Any] = [sums.reduce(self.get_data_parallel_group()) if self.mesh.is_last_stage else None]
        if self.mesh.pipeline_size > 1:
            last = self.mesh.stage_rank(self.mesh.pipeline_size - 1)
            dist.broadcast_object_list(metrics, last, group=self.mesh.pipeline_group)
        reduced: dict[str, float] = metrics[0]
        return reduced

    def _count_passes(self, needed: int, reference: MegatronEngine | None) -> int:
        """Return the number of micro-batches to run: an interleaved schedule takes groups of as many as stages.

        A rank without rows runs some too, to take part in the gradient reduction of its data-parallel group.
        """
        plans = [self.plan, *([] if reference is None else [reference.plan])]
        group = self.mesh.pipeline_size if any(plan.chunks > 1 for plan in plans) else 1
        return max(-(-needed // group), 1) * group

    def _reducing(self, forward_only: bool) -> AbstractContextManager[None]:
        if forward_only or self.optimizer is None or not self.optimizer.overlaps:
            return nullcontext()
        return reduce_in_backward(self.runners, self._steps_next)

    def _router_groups(self) -> list[Any]:
        """Return the groups along which ranks have other layers, or other positions of the same rows."""
        groups = [self.mesh.pipeline_group] if self.mesh.pipeline_size > 1 else []
        groups += [self.mesh.context_group] if self.mesh.context_size > 1 else []
        return [*groups, self.mesh.tensor_group] if self.config.sequence_parallel else groups

    def _router_metrics(self) -> dict[str, float]:
        """Return the load of the experts in the last batch."""
        if self.tape is None or self.tape.load is None:
            return {}
        data = [self.mesh.data_group] if self.mesh.data_size > 1 else []
        return self.tape.load.metrics([*self._router_groups(), *data], f"{self.setup.section}/")

    def _row_layout(self) -> RowLayout:
        mesh = self.mesh
        return RowLayout(
            packs=self.config.use_remove_padding,
            tensor_ranks=mesh.tensor_size,
            context_ranks=mesh.context_size,
            context_rank=mesh.context_rank,
            context_group=mesh.context_group,
        )

    def _reference_for(self, settings: ForwardSettings) -> MegatronEngine | None:
        if settings.vocabulary_kl is None:
            return None
        if self._reference is None or self.plan.is_value_model:
            raise CapabilityError(f"vocabulary_kl={settings.vocabulary_kl} needs a reference, and this engine has none")
        return self._reference

    def set_reference(self, reference: BaseEngine) -> None:
        """Set the reference; see :meth:`rollcast.contracts.engine.BaseEngine.set_reference`.

        Raises:
            CapabilityError: it is not a MegatronEngine on the same mesh, or it is this engine without an adapter.
        """
        if reference is self:
            self._require_adapter()
        if not isinstance(reference, MegatronEngine) or reference.mesh is not self.mesh:
            raise CapabilityError("the reference of a MegatronEngine must be a MegatronEngine on the same mesh")
        self._reference = reference

    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full parameters by their Hugging Face names, tied ones once; at most 64 MiB are gathered at a time.

        They do not contain the adapter. All ranks must iterate to the end together.
        """
        with self.holding_weights():
            complete_weights(self.runners)
            yield from gather(self.plan, dict(self.stage.named_parameters()), self.shapes)

    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full parameters with the adapter merged into them."""
        with self.holding_weights():
            parameters = self.get_per_tensor_param()
            yield from parameters if self.adapter is None else self.adapter.merge(parameters, self.stage)

    def get_adapter(self) -> AdapterWeights | None:
        """Return the adapter; see :meth:`rollcast.contracts.engine.BaseEngine.get_adapter`."""
        if self.adapter is None:
            return None
        with self.holding_weights():
            return self.adapter.gather_weights(self.stage)

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Disable the adapter; see :meth:`rollcast.contracts.engine.BaseEngine.disable_adapter`."""
        return self._require_adapter().without_adapter()

    def _require_adapter(self) -> Stage:
        require_adapter(None if self.adapter is None else self.adapter.adapter)
        if not self.stage.adapters:
            raise RuntimeError("initialize() has to be called before the engine computes")
        return self.stage

    @contextmanager
    def _as_base(self) -> Iterator[None]:
        """Use the stage as that of the base model, without dropout."""
        was_training = self.stage.training
        self.stage.eval()
        try:
            with self._require_adapter().without_adapter():
                yield
        finally:
            self.stage.train(was_training)

    @contextmanager
    def in_process_module(self) -> Iterator[nn.Module]:
        """Yield the transformers model in eval mode without gradients, whole on this rank.

        The model is a copy with its own memory and the adapter merged, rebuilt after the weights have changed. All
        ranks enter and leave together; in between, each may run the module any number of times.
        """
        with self.eval_mode():
            if self._whole is None:
                self._whole = whole_module(self.setup.model, self._merged(), self.device)
            yield self._whole

    def to(self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move the selected state to ``device``: ``cpu``, or for any other name the accelerator.

        With ``grad``, moving to the CPU drops the gradients.
        """
        complete_weights(self.runners)
        if device != "cpu":
            self._load(model=model, optimizer=optimizer)
            return
        if grad and self.can_offload:
            self._drop_gradients()
        self._free(model=model, optimizer=optimizer)

    def _load(self, *, model: bool = False, optimizer: bool = False) -> None:
        if model:
            self.memory.load_weights()
        if optimizer and self.optimizer is not None:
            self.optimizer.load(self._copies)

    def _free(self, *, model: bool = False, optimizer: bool = False) -> None:
        if not self.can_offload:
            return
        if model:
            self._whole = None
            self.memory.free_weights()
        if optimizer and self.optimizer is not None:
            self.optimizer.offload(self._copies)

    def _offload(self) -> None:
        self._free(model=self.config.param_offload, optimizer=self.config.optimizer_offload)

    def _drop_gradients(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        self.memory.free_gradients()

    @contextmanager
    def holding_weights(self) -> Iterator[None]:
        """Keep the weights on the device during the block, and return them to host memory if they were there."""
        was_freed = not self.memory.has_weights
        self._load(model=was_freed)
        try:
            yield
        finally:
            self._free(model=was_freed)

    def on_loaded(self) -> None:
        self._whole = None

    def checkpoint_state(self) -> EngineState:
        complete_weights(self.runners)
        return EngineState(
            model_type=self.setup.model_type,
            rank=self.setup.context.rank,
            mesh=self.mesh,
            model=self.stage,
            optimizer=self.optimizer,
            shapes=self.shapes,
            dtype=DTYPES[self.config.dtype],
            schedule_step=self.schedule_step,
            adapter=self.adapter,
        )

    def write_export(self, path: Path, is_writer: bool) -> None:
        """Write the model with its adapter merged, and the adapter separately.

        See :meth:`rollcast_engine.base.TorchEngine.write_export`.
        """
        try:
            write_folder(path, self.setup.model, self.setup.model_type, self._merged(), is_writer)
        finally:
            adapter = self.get_adapter()
        if is_writer and adapter is not None and not self.plan.is_value_model:
            write_adapter(path, adapter)

    @classmethod
    def export_checkpoint(cls, checkpoint: Path, model: ModelConfig, output: Path) -> None:
        """Convert a checkpoint of this engine to a Hugging Face folder, in one process with one rank.

        Raises:
            CheckpointError: the checkpoint is incomplete, damaged, or belongs to another engine or model.
        """
        summary = read_summary(checkpoint, EngineState.engine)
        model_type: ModelType = summary["model_type"]
        described = summary.get("adapter")
        dtype = next(iter(summary["parameters"].values()))[1] if described is None else described["dtype"]
        if described is not None:
            model = _with_adapter(model, described["config"])
        setup = EngineSetup(model_type, model, MegatronConfig(dtype=dtype), None, WorkerContext())
        engine = cls(setup)
        engine.prepare_export()
        engine.load_checkpoint(checkpoint)
        engine.export(output)

    def prepare_export(self) -> None:
        """Build the whole model in host memory, to load a checkpoint into it.

        Its weights are set only if the checkpoint has none of them but an adapter.

        Raises:
            CheckpointError: the base model of the adapter cannot be read.
        """
        model_map = find_map(load_hf_config(self.setup.model))
        self.shapes = hf_shapes(self.setup.model, self.setup.model_type)
        self.mesh = join_mesh(self, self.config, self.setup.context, self.setup.seed)
        is_value = self.setup.model_type == "value_model"
        self.plan = Plan(model_map, self.mesh, is_value, check_model(model_map, self.config))
        self.stage = build_model(self.plan, self.config, self.device)
        if not self.setup.model.trains_adapter:
            return
        try:
            folder = open_folder(Path(self.setup.model.path))
            load_folder(self.plan, dict(self.stage.named_parameters()), self.shapes, folder)
            self._attach_adapter(folder)
        except ConfigError as error:
            raise CheckpointError(
                f"the checkpoint contains an adapter, but its model cannot be built: {error}"
            ) from error

    def get_data_parallel_rank(self) -> int:
        """Return the index of the batch shard that this rank works on, together with its copy of the model."""
        return self.mesh.data_rank

    def get_data_parallel_size(self) -> int:
        """Return the number of batch shards: copies of the model, or of context-parallel groups of copies."""
        return self.mesh.data_size

    def get_data_parallel_group(self) -> Any:
        """Return the process group of the ranks with the same part of the model; None for a single one."""
        return self.mesh.data_group if self.mesh.data_size > 1 else None

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Return True on one of the ranks that share rows: the first of the last stage."""
        return self.mesh.is_last_stage and self.mesh.tensor_rank == 0 and self.mesh.context_rank == 0


def _with_adapter(model: ModelConfig, described: Mapping[str, Any]) -> ModelConfig:
    """Return the config of a model with an adapter that PEFT's config describes."""
    return replace(
        model,
        lora_rank=described["r"],
        lora_alpha=described["lora_alpha"],
        target_modules=described["target_modules"],
        lora_adapter_path=None,
    )


def _check_adamw(optim: OptimConfig) -> None:
    if optim.optimizer != "adamw" or optim.optimizer_kwargs:
        raise ConfigError(
            f"optim.optimizer={optim.optimizer} with optimizer_kwargs={dict(optim.optimizer_kwargs)}: the megatron "
            "engine only has megatron-core's AdamW, without further options; use optim.optimizer=adamw, or engine=fsdp"
        )
