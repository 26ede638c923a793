"""The FSDP engine: forward, backward and optimizer steps of a Hugging Face model on one rank or sharded by FSDP2."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from rollcast.contracts.device import empty_cache
from rollcast.contracts.engine import EngineCapabilities, EngineSetup
from rollcast.contracts.rollout import ROUTED_EXPERTS
from rollcast.errors import CapabilityError, ConfigError
from rollcast.protocol import DataProto
from rollcast_data.vision.model_inputs import ImageInputs, is_vision_model
from rollcast_engine.base import TorchEngine
from rollcast_engine.batching import check_budget, plan_batch
from rollcast_engine.hf import DTYPES, load_hf_config, transformer
from rollcast_engine.images import MicroImages
from rollcast_engine.keys import naming_keys
from rollcast_engine.lora import require_adapter
from rollcast_engine.optim import build_optimizer, set_lr
from rollcast_engine.process_group import join_process_group
from rollcast_engine.reduce import agree_on_counts
from rollcast_engine.routing import check_replay, start_record
from rollcast_engine.transfer import CopyStream
from rollcast_fsdp.attention import plain_attention, use_packed_attention
from rollcast_fsdp.checkpoint import EngineState
from rollcast_fsdp.exporting import export_checkpoint, export_live
from rollcast_fsdp.kernels import apply_liger, compile_layers, without_compile
from rollcast_fsdp.model import build_module, check_state, enable_checkpointing
from rollcast_fsdp.passes import Passes
from rollcast_fsdp.reference import BaseModelReference, Reference
from rollcast_fsdp.residency import Residency
from rollcast_fsdp.routing import attach_tape
from rollcast_fsdp.schemas import FsdpConfig
from rollcast_fsdp.sharding import Sharding, check_heads, decoder_layers, full_tensor, local_part, shard_module
from rollcast_fsdp.step import TokenForward
from rollcast_fsdp.tensors import ModelTensors

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rollcast.contracts.engine import BaseEngine, ForwardSettings, LossFunction, ModelConfig
    from rollcast.contracts.weights import AdapterWeights
    from rollcast_engine.lora import Adapter
    from rollcast_engine.routing import RouterTape

__all__ = ["FsdpEngine"]

log = logging.getLogger(__name__)


class FsdpEngine(TorchEngine):
    """An engine for any causal LM of transformers; one rank holds it whole, several shard it with FSDP2.

    The gradient is that of the sum of the loss function's shares over all micro-batches and ranks.

    Raises:
        ConfigError: a key of the engine or optimizer has an invalid value.
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
        weight_mixing=True,
    )
    config_schema: ClassVar[type] = FsdpConfig

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        if not isinstance(setup.engine, FsdpConfig):
            raise ConfigError(f"the fsdp engine needs a FsdpConfig, not a {type(setup.engine).__name__}")
        self.config: FsdpConfig = setup.engine
        self.config.check(setup.context.world_size, f"{setup.section}.engine")
        self.module: nn.Module
        self.sharding: Sharding | None = None
        self.adapter: Adapter | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.forward: TokenForward
        #: Adds images to micro-batches; None for a model of text.
        self.vision: MicroImages | None = None
        self.passes: Passes | None = None
        self.residency: Residency | None = None
        #: Modes that are entered, outermost first.
        self._modes: list[bool] = []
        #: True if the weights may differ from those that were last offloaded.
        self._changed = True
        self._reference: Reference | BaseModelReference | None = None

    @classmethod
    def compute_dtype(cls, config: FsdpConfig) -> str:
        return str(DTYPES[config.param_dtype or config.model_dtype]).removeprefix("torch.")

    def initialize(self) -> None:
        """Load the model on this rank, shard it if there are several ranks, and build the optimizer.

        Raises:
            ConfigError: the model folder cannot be used; the message says why.
        """
        context, host = self.setup.context, torch.device("cpu")
        hf_config = load_hf_config(self.setup.model)
        with naming_keys(self.setup.section):
            check_heads(hf_config, self.config.ulysses_sequence_parallel_size, context.world_size)
        if is_vision_model(hf_config):
            self._build_vision()
        self.use_local_device()
        plan = build_module(self.setup, DTYPES[self.config.model_dtype])
        module = plan.module
        if self.config.enable_gradient_checkpointing:
            enable_checkpointing(module)
        if self.setup.model.use_liger:
            apply_liger(module, self.device)
        if self.config.use_torch_compile:
            with naming_keys(self.setup.section):
                compile_layers(decoder_layers(module), self.device)
        if self.config.shards(context.world_size):
            join_process_group(context)
            self.sharding = shard_module(module, self.config, context, self.device)
            if self.config.share_prompts:
                log.info("share_prompts has no effect here: FSDP2 holds the model")
        plan.fill(self.device, host if self.config.offload_policy else self.device)
        self.module, self.adapter = module.eval(), plan.adapter
        with naming_keys(self.setup.section):
            check_state(self.module, self.config)
            kernel = None
            if self.config.use_remove_padding:
                dtype = DTYPES[self.config.param_dtype or self.config.model_dtype]
                attention = self.setup.model.attn_implementation
                kernel = use_packed_attention(transformer(self.module), attention, self.device, dtype)
            tape = attach_tape(self.module, self.config, self._sequence_group())
            self.forward = TokenForward(self.module, self.config, self.sharding, kernel, tape is None)
        copies = CopyStream(self.device)
        self.passes = Passes(self.forward, self.config, self.sharding, copies, tape)
        if self.setup.optim is not None:
            self.optimizer = build_optimizer(self.module.parameters(), self.setup.optim)
        # Under FSDP2's policy, state never moves.
        moves = CopyStream(host) if self.config.offload_policy else copies
        self.residency = Residency(self.module, self.optimizer, moves)
        self._offload()

    def _build_vision(self) -> None:
        """Load the image processor of the model's folder.

        Raises:
            ConfigError: it does not load, or rows are to be packed.
        """
        if self.config.use_remove_padding:
            raise ConfigError(
                f"{self.setup.section}.engine.use_remove_padding is true, but rows with images are not packed; set it "
                f"to false for the vision-language model {self.setup.model.path}"
            )
        inputs = ImageInputs(self.setup.model.path, self.setup.model.trust_remote_code)
        self.vision = MicroImages(inputs, fills=self.config.shards(self.setup.context.world_size))

    @contextmanager
    def mode(self, training: bool) -> Iterator[None]:
        """Enter train or eval mode with the weights on the device.

        Leaving train mode drops the gradients and returns cached memory to the device, so that a rollout finds both.
        The outermost mode moves offloaded state: an update with many mini-batches moves it once each way.
        """
        was_training = self.module.training
        self._modes.append(training)
        residency = self._residency()
        if self.config.param_offload:
            residency.load(module=True, optimizer=False)
        self.module.train(training)
        try:
            yield
        finally:
            self.module.train(was_training)
            self._modes.pop()
            if training and not any(self._modes):
                self.module.zero_grad(set_to_none=True)
            self._changed = self._changed or training
            if not self._modes:
                self._offload()
                if training:
                    empty_cache()

    def optimizer_zero_grad(self) -> None:
        """Drop all gradients."""
        self._passes().drop_unreduced_gradients()
        self.require_optimizer(self.optimizer).zero_grad(set_to_none=True)

    def optimizer_step(self) -> tuple[float, bool]:
        """Clip gradients to ``optim.clip_grad`` and step; return the norm before clipping, and True if skipped.

        If the norm is not finite, the step is skipped and the gradients are dropped.
        """
        optimizer = self.require_optimizer(self.optimizer)
        norm = self._clip()
        if not math.isfinite(norm):
            log.warning("the gradient's norm is %s: the optimizer step is skipped", norm)
            optimizer.zero_grad(set_to_none=True)
            return norm, True
        set_lr(optimizer, self.current_lr())
        # The state stays on the device until the mode ends.
        self._residency().load(module=False, optimizer=True)
        optimizer.step()
        self._changed = True
        if not self._modes:
            self._offload()
        return norm, False

    def _clip(self) -> float:
        if self.sharding is not None:
            self.sharding.reshard()
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.optim.clip_grad)
        return float(full_tensor(norm, self.device))

    def forward_backward_batch(
        self,
        data: DataProto,
        loss_function: LossFunction | None,
        settings: ForwardSettings,
        forward_only: bool = False,
    ) -> tuple[DataProto | None, dict[str, float]]:
        """Run the micro-batches; see :meth:`rollcast.contracts.engine.BaseEngine.forward_backward_batch`.

        Raises:
            ConfigError: a row of any rank does not fit the token budget; every rank raises.
            TypeError: training without a loss function.
        """
        if not forward_only and loss_function is None:
            raise TypeError("forward_backward_batch needs a loss_function unless forward_only=True")
        parts = self.config.ulysses_sequence_parallel_size
        tape = self._passes().tape
        check_replay(data, tape)
        plan = plan_batch(data, settings, self.config.use_remove_padding, parts, self.vision)
        agreed = agree_on_counts(plan, settings, self.get_data_parallel_group(), self.device)
        check_budget(agreed.longest, settings, parts)
        plan = plan.split_to(agreed.micro_batches)
        reference = self._reference_for(settings)
        score = None if reference is None else reference.score
        in_place = nullcontext() if reference is None else reference.in_place()
        record = start_record(settings, plan.source, tape, self.device)
        routing = nullcontext() if tape is None else tape.batch(self.device)
        with naming_keys(self.setup.section), torch.set_grad_enabled(not forward_only), in_place, routing:
            outputs, sums = self._passes().run(plan, agreed, loss_function, settings, score, record)
        metrics = sums.reduce(self.get_data_parallel_group())
        shared = [] if self._sequence_group() is None else [self._sequence_group()]
        if not forward_only:
            return None, metrics | self._router_metrics(tape, shared)
        batch = plan.source.as_batch(outputs)
        return (batch if record is None else batch.with_columns({ROUTED_EXPERTS: record.column(shared)})), metrics

    def _router_metrics(self, tape: RouterTape | None, shared: list[Any]) -> dict[str, float]:
        """Return the load of the experts in the last batch."""
        if tape is None or tape.load is None:
            return {}
        group = self.get_data_parallel_group()
        return tape.load.metrics(shared if group is None else [*shared, group], f"{self.setup.section}/")

    def _sequence_group(self) -> Any:
        return None if self.sharding is None else self.sharding.sequence_group

    def _reference_for(self, settings: ForwardSettings) -> Reference | BaseModelReference | None:
        if settings.vocabulary_kl is None:
            return None
        if self._reference is None or self._is_value_model():
            raise CapabilityError(f"vocabulary_kl={settings.vocabulary_kl} needs a reference, and this engine has none")
        return self._reference

    def set_reference(self, reference: BaseEngine) -> None:
        """Set the reference; see :meth:`rollcast.contracts.engine.BaseEngine.set_reference`.

        Raises:
            CapabilityError: it is not a FsdpEngine on the same number of ranks, or it is this engine without an
                adapter.
        """
        ranks = self.setup.context.world_size
        if reference is self:
            self._reference = BaseModelReference(self.forward, require_adapter(self.adapter))
            return
        if not isinstance(reference, FsdpEngine) or reference.setup.context.world_size != ranks:
            raise CapabilityError(f"the reference of a FsdpEngine on {ranks} ranks must be one on the same ranks")
        if reference.forward.layout() != self.forward.layout():
            raise CapabilityError(
                "the exact KL compares two engines position by position: use_remove_padding, use_fused_kernels and "
                "ulysses_sequence_parallel_size must be the same in actor.engine and ref.engine"
            )
        self._reference = Reference(reference.forward, reference.mode, reference.sharding)

    @torch.no_grad()
    def mix_weights(self, source: BaseEngine, share: float) -> None:
        """Mix each rank's shards; see :meth:`rollcast.contracts.engine.BaseEngine.mix_weights`.

        Raises:
            CapabilityError: the source is not a FsdpEngine with the same parameters and shards.
        """
        if not isinstance(source, FsdpEngine):
            raise CapabilityError(f"a FsdpEngine mixes its weights with those of another, not of a {type(source)}")
        with self.mode(training=False), source.mode(training=False):
            for engine in (self, source):
                if engine.sharding is not None:
                    engine.sharding.reshard()
            own, others = (dict(engine.module.named_parameters()) for engine in (self, source))
            shapes, other_shapes = (
                {name: local_part(parameter).shape for name, parameter in part.items()} for part in (own, others)
            )
            if shapes != other_shapes:
                raise CapabilityError("weights can be mixed with those of an engine with the same shards only")
            for name, weight in own.items():
                local_part(weight).mul_(1.0 - share).add_(local_part(others[name]), alpha=share)
            self._changed = True

    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full parameters by their Hugging Face names, tied ones once; at most 64 MiB are gathered at a time.

        All ranks must iterate to the end together.
        """
        yield from self._tensors().gather()

    def get_adapter(self) -> AdapterWeights | None:
        """Return the adapter; see :meth:`rollcast.contracts.engine.BaseEngine.get_adapter`."""
        return self._tensors().gather_adapter()

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Disable the adapter; see :meth:`rollcast.contracts.engine.BaseEngine.disable_adapter`."""
        return require_adapter(self.adapter).disabled()

    @contextmanager
    def in_process_module(self) -> Iterator[nn.Module]:
        """Yield the module in eval mode without gradients, whole on this rank.

        All ranks enter and leave together; in between, each may run the module any number of times.
        """
        whole = nullcontext() if self.sharding is None else self.sharding.unsharded()
        padded = plain_attention(transformer(self.module), self.setup.model.attn_implementation)
        plain = without_compile() if self.config.use_torch_compile else nullcontext()
        with self.eval_mode(), padded, whole, plain:
            yield self.module

    def to(self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move the selected state to ``device``: ``cpu``, or for any other name the accelerator.

        Gradients exist only inside :meth:`train_mode`, with the weights on the device. With ``grad``, moving to the CPU
        drops them.
        """
        residency = self._residency()
        if device != "cpu":
            residency.load(model, optimizer)
            return
        if grad or model:
            self.module.zero_grad(set_to_none=True)
        residency.offload(model, optimizer, self._changed)
        self._changed = self._changed and not model
        empty_cache()

    def _offload(self) -> None:
        params, state = self.config.param_offload, self.config.optimizer_offload
        if params or state:
            self._residency().offload(params, state, self._changed)
            self._changed = self._changed and not params
            empty_cache()

    def _residency(self) -> Residency:
        if self.residency is None:
            raise RuntimeError("initialize() has to be called before the engine computes")
        return self.residency

    def on_loaded(self) -> None:
        self._changed = True

    def checkpoint_state(self) -> EngineState:
        return EngineState(
            model_type=self.setup.model_type,
            rank=self.setup.context.rank,
            world_size=self.setup.context.world_size,
            distributed=self.sharding is not None,
            tensors=self._tensors().saved(),
            adapter=self.adapter,
            optimizer=self.optimizer,
            schedule_step=self.schedule_step,
        )

    def write_export(self, path: Path, is_writer: bool) -> None:
        """Write the model; see :meth:`rollcast_engine.base.TorchEngine.write_export`."""
        export_live(path, self.setup.model, self.setup.model_type, self._tensors(), is_writer)

    @classmethod
    def export_checkpoint(cls, checkpoint: Path, model: ModelConfig, output: Path) -> None:
        """Convert a checkpoint to a Hugging Face folder, in one process without a process group.

        Raises:
            CheckpointError: the checkpoint is incomplete, or belongs to another engine or model.
        """
        export_checkpoint(checkpoint, model, output)

    def get_data_parallel_rank(self) -> int:
        """Return the data-parallel rank; ranks that share each sequence have the same one."""
        return self.setup.context.rank // self.config.ulysses_sequence_parallel_size

    def get_data_parallel_size(self) -> int:
        """Return the number of ranks, or of groups of ranks that share each sequence."""
        return self.setup.context.world_size // self.config.ulysses_sequence_parallel_size

    def get_data_parallel_group(self) -> Any:
        """Return the torch process group of the ranks with other rows; None for a single rank without sharding."""
        return None if self.sharding is None else self.sharding.data_group

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Return True on the first of the ranks that share each sequence; all of them have the outputs."""
        return self.setup.context.rank % self.config.ulysses_sequence_parallel_size == 0

    def _is_value_model(self) -> bool:
        return self.setup.model_type == "value_model"

    def _tensors(self) -> ModelTensors:
        return ModelTensors(self.module, self.sharding, self.adapter, self.device)

    def _passes(self) -> Passes:
        if self.passes is None:
            raise RuntimeError("initialize() has to be called before the engine computes")
        return self.passes
