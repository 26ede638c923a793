"""The engine: forward, backward and AdamW over a Hugging Face model, alone or sharded by FSDP2."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from rollcast.contracts.engine import BaseEngine, EngineCapabilities, EngineSetup
from rollcast.errors import CapabilityError, ConfigError
from rollcast.protocol import DataProto
from rollcast.runtime.device import empty_cache, local_device
from rollcast_engine import export as exports
from rollcast_engine.batching import BatchPlan, MicroBatch, check_budget, dummy_micro_batch, plan_batch, tensor_columns
from rollcast_engine.hf import DTYPES, parameters_by_name
from rollcast_engine.optim import build_optimizer, check_optim, learning_rate
from rollcast_engine.process_group import join_process_group
from rollcast_engine.reduce import MetricSums, agree_on_counts
from rollcast_fsdp import checkpoint as checkpoints
from rollcast_fsdp.model import build_module, enable_checkpointing
from rollcast_fsdp.reference import Reference
from rollcast_fsdp.schemas import FsdpConfig
from rollcast_fsdp.sharding import Sharding, full_tensor, shard_module
from rollcast_fsdp.step import dummy_loss, run_micro_batch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rollcast.contracts.algorithm import Denominators
    from rollcast.contracts.engine import ForwardSettings, LossFunction, ModelConfig

__all__ = ["FsdpEngine"]

log = logging.getLogger(__name__)


class FsdpEngine(BaseEngine):
    """Any causal LM of transformers; one rank holds it whole, several shard it with FSDP2.

    The gradient is that of the sum of the loss function's shares over all micro-batches and ranks.

    Raises:
        ConfigError: on construction, for an engine or optimizer key with a value that is not valid.
    """

    capabilities: ClassVar[EngineCapabilities] = EngineCapabilities(
        value_model=True,
        sum_pi_squared=True,
        vocabulary_kl=True,
        in_process_module=True,
        token_budget=True,
        offload=True,
    )
    config_schema: ClassVar[type] = FsdpConfig

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        if not isinstance(setup.engine, FsdpConfig):
            raise ConfigError(f"the fsdp engine is configured by FsdpConfig, not {type(setup.engine).__name__}")
        self.config: FsdpConfig = setup.engine
        self.config.check(setup.context.world_size)
        if setup.optim is not None:
            check_optim(setup.optim)
        self.device = torch.device("cpu")
        self.module: nn.Module
        self.sharding: Sharding | None = None
        self.optimizer: torch.optim.AdamW | None = None
        self.schedule_step = 0
        self._has_stale_gradients = False
        self._reference: Reference | None = None

    def initialize(self) -> None:
        """Load the model on this rank, shard it if there are more, and build the optimizer.

        Raises:
            ConfigError: the model folder cannot be used; says why.
        """
        context = self.setup.context
        self.device = local_device(context.local_rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        module = build_module(self.setup, DTYPES[self.config.model_dtype])
        if self.config.gradient_checkpointing:
            enable_checkpointing(module)
        if context.world_size > 1 or self.config.computes_in_bf16:
            join_process_group(context)
            self.sharding = shard_module(module, self.config, context, self.device)
            if self.config.share_prompts:
                log.info("share_prompts has no effect here: the model is sharded, or computes in bf16")
        self.module = module.to(self.device).eval()
        if self.setup.optim is not None:
            self.optimizer = build_optimizer(self.module.parameters(), self.setup.optim)
        self._offload()

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        """Dropout on, gradients on, weights on the device, for the calls inside."""
        with self.mode(training=True), torch.enable_grad():
            yield

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Dropout off and no gradient, for the calls inside.

        By ``no_grad``: weights gathered under ``inference_mode`` could not be trained afterwards.
        """
        with self.mode(training=False), torch.no_grad():
            yield

    @contextmanager
    def mode(self, training: bool) -> Iterator[None]:
        """Dropout on or off, and weights on the device, for the calls inside; gradients stay as they are."""
        was_training = self.module.training
        self._to(self.device, model=self.config.param_offload)
        self.module.train(training)
        try:
            yield
        finally:
            self.module.train(was_training)
            self._offload()

    def optimizer_zero_grad(self) -> None:
        """Forget all gradients."""
        if self._has_stale_gradients:
            # FSDP2 keeps what was accumulated but not reduced out of reach: reduce it, then drop it.
            with torch.enable_grad():
                torch.autograd.backward(dummy_loss(self.module, self.device))
            self._has_stale_gradients = False
        self._trained().zero_grad(set_to_none=True)

    def optimizer_step(self) -> tuple[float, bool]:
        """Clip to ``optim.clip_grad`` and step; gives the norm before clipping, and whether skipped.

        With a norm that is not finite nothing changes but the gradients, which are dropped.
        """
        optimizer = self._trained()
        norm = self._clip()
        if not math.isfinite(norm):
            log.warning("the gradient's norm is %s: the optimizer step is skipped", norm)
            optimizer.zero_grad(set_to_none=True)
            return norm, True
        for group in optimizer.param_groups:
            group["lr"] = self.current_lr()
        self._to(self.device, optimizer=self.config.optimizer_offload)
        optimizer.step()
        if self.config.optimizer_offload:
            self._to(torch.device("cpu"), optimizer=True)
        return norm, False

    def _clip(self) -> float:
        optim = self._optim()
        if self.sharding is not None:
            self.sharding.reshard()
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), optim.clip_grad)
        return float(full_tensor(norm, self.device))

    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one; gives the learning rate from now on."""
        self.schedule_step += 1
        return self.current_lr()

    def current_lr(self) -> float:
        """The learning rate that the next optimizer step uses."""
        return learning_rate(self._optim(), self.schedule_step)

    def forward_backward_batch(
        self,
        data: DataProto,
        loss_function: LossFunction | None,
        settings: ForwardSettings,
        forward_only: bool = False,
    ) -> tuple[DataProto | None, dict[str, float]]:
        """See :meth:`rollcast.contracts.engine.BaseEngine.forward_backward_batch`.

        Raises:
            ConfigError: on every rank, if a row of any rank does not fit the token budget.
            TypeError: training without a loss function.
        """
        if not forward_only and loss_function is None:
            raise TypeError("forward_backward_batch needs a loss_function unless forward_only=True")
        plan = plan_batch(tensor_columns(data), settings)
        agreed = agree_on_counts(plan, settings, self.get_data_parallel_group(), self.device)
        check_budget(agreed.longest, settings)
        sums = MetricSums()
        reference = self._reference_for(settings)
        with torch.set_grad_enabled(not forward_only), nullcontext() if reference is None else reference.in_place():
            outputs = self._run(plan, agreed.micro_batches, agreed.denominators, loss_function, settings, sums)
        metrics = sums.reduce(self.get_data_parallel_group())
        return (DataProto.from_dict(tensors=outputs) if forward_only else None), metrics

    def _run(
        self,
        plan: BatchPlan,
        count: int,
        denominators: Denominators,
        loss_function: LossFunction | None,
        settings: ForwardSettings,
        sums: MetricSums,
    ) -> dict[str, Tensor]:
        """Forward, and backward if gradients are on; gives float32 ``[B, T]`` outputs if they are off."""
        training = torch.is_grad_enabled()
        names = ["values"]
        if not self._is_value_model():
            asked = {
                "entropy": settings.calculate_entropy,
                "sum_pi_squared": settings.calculate_sum_pi_squared,
                "vocabulary_kl": settings.vocabulary_kl is not None,
            }
            names = ["log_probs", *(name for name, wanted in asked.items() if wanted)]
        shape = (len(plan.starts), plan.response_width)
        outputs = {name: torch.zeros(shape, dtype=torch.float32) for name in names} if not training else {}
        # FSDP2 averages gradients over the ranks; the shares have to be added up.
        scale = float(self.get_data_parallel_size()) if self.sharding is not None else 1.0
        share = self.config.share_prompts and self.sharding is None
        reference, kl = self._reference_for(settings), settings.vocabulary_kl
        compare = None if reference is None or kl is None else reference.compare_by(kl, settings)
        finished = False
        try:
            for index in range(count):
                micro = self._micro_batch(plan, index)
                if training and self.sharding is not None:
                    self.sharding.set_gradient_sync(index == count - 1)
                given, loss = run_micro_batch(
                    self.module, micro, denominators, loss_function, settings, sums, share, compare
                )
                if training and loss is not None:
                    torch.autograd.backward(loss * scale)
                for name, output in outputs.items():
                    if not micro.is_dummy:
                        micro.scatter(given[name], output)
            finished = True
        finally:
            self._after_run(training, finished)
        return outputs

    def _reference_for(self, settings: ForwardSettings) -> Reference | None:
        if settings.vocabulary_kl is None:
            return None
        if self._reference is None or self._is_value_model():
            raise CapabilityError(f"vocabulary_kl={settings.vocabulary_kl} was asked of an engine without a reference")
        return self._reference

    def _micro_batch(self, plan: BatchPlan, index: int) -> MicroBatch:
        if index < len(plan):
            return plan.micro_batch(index, self.device)
        return dummy_micro_batch(self.device)

    def _after_run(self, training: bool, finished: bool) -> None:
        if self.sharding is None:
            return
        if training:
            self.sharding.set_gradient_sync(True)
        if not finished:
            self.sharding.reset()
            self._has_stale_gradients = self._has_stale_gradients or training
        self.sharding.reshard()

    def set_reference(self, reference: BaseEngine) -> None:
        """See :meth:`rollcast.contracts.engine.BaseEngine.set_reference`.

        Raises:
            CapabilityError: it is not a FsdpEngine on as many ranks.
        """
        ranks = self.get_data_parallel_size()
        if not isinstance(reference, FsdpEngine) or reference.get_data_parallel_size() != ranks:
            raise CapabilityError(f"the reference of a FsdpEngine on {ranks} ranks must be another on the same ranks")
        self._reference = Reference(reference)

    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """Full parameters by their Hugging Face names, gathered one at a time; tied ones once.

        All ranks have to go through it to the end together.
        """
        for name, tensor in self._named_tensors().items():
            yield name, full_tensor(tensor, self.device)

    @contextmanager
    def in_process_module(self) -> Iterator[nn.Module]:
        """The module in evaluation mode without gradient, whole on this rank.

        All ranks enter and leave together; between, each may run it as often as it likes.
        """
        with self.eval_mode():
            if self.sharding is None:
                yield self.module
            else:
                with self.sharding.unsharded():
                    yield self.module

    def to(self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move the named state to ``device``: ``cpu``, or the accelerator by any other name.

        Gradients follow their parameters: they move with ``model``, or by ``grad`` alone to the
        parameters' own device.
        """
        target = torch.device("cpu") if device == "cpu" else self.device
        self._to(target, model=model, optimizer=optimizer, grad=grad)

    def _to(self, device: torch.device, *, model: bool = False, optimizer: bool = False, grad: bool = False) -> None:
        if model:
            self.module.to(device)
        if grad:
            for parameter in self.module.parameters():
                if parameter.grad is not None and parameter.grad.device != parameter.device:
                    parameter.grad = parameter.grad.to(parameter.device)
        if optimizer and self.optimizer is not None:
            for state in self.optimizer.state.values():
                for name, value in state.items():
                    state[name] = value.to(device)
        if device.type == "cpu":
            empty_cache()

    def _offload(self) -> None:
        host = torch.device("cpu")
        if self.config.param_offload or self.config.optimizer_offload:
            self._to(host, model=self.config.param_offload, optimizer=self.config.optimizer_offload)

    def save_checkpoint(self, path: Path) -> None:
        """Write model, optimizer, schedule and every rank's RNG under ``path``.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        checkpoints.save(path, self._state())

    def load_checkpoint(self, path: Path) -> None:
        """Load what :meth:`save_checkpoint` wrote, on as many ranks or on another number.

        Raises:
            CheckpointError: the folder is incomplete, or of another model; names what differs.
        """
        self.schedule_step = checkpoints.load(path, self._state())

    def _state(self) -> checkpoints.EngineState:
        return checkpoints.EngineState(
            model_type=self.setup.model_type,
            rank=self.setup.context.rank,
            world_size=self.setup.context.world_size,
            distributed=self.sharding is not None,
            tensors=self._named_tensors(),
            optimizer=self.optimizer,
            schedule_step=self.schedule_step,
        )

    def export(self, path: Path) -> None:
        """Write a Hugging Face folder from the live model; rank 0 writes, all ranks take part."""
        keep = self.setup.context.rank == 0
        whole: dict[str, Tensor] = {}
        for name, tensor in self.get_per_tensor_param():
            if keep:
                whole[name] = tensor.cpu()
        if keep:
            exports.write_folder(path, self.setup.model, self.setup.model_type, whole)
        if self.sharding is not None:
            torch.distributed.barrier(group=self.get_data_parallel_group())

    @classmethod
    def export_checkpoint(cls, checkpoint: Path, model: ModelConfig, output: Path) -> None:
        """Turn a checkpoint into a Hugging Face folder, in one process without process group.

        Raises:
            CheckpointError: the checkpoint is incomplete, or of another engine or model.
        """
        model_type, tensors = checkpoints.read_weights(checkpoint)
        exports.write_folder(output, model, model_type, tensors)

    def get_data_parallel_rank(self) -> int:
        """The rank: each works on its own shard of a batch."""
        return self.setup.context.rank

    def get_data_parallel_size(self) -> int:
        """The number of ranks."""
        return self.setup.context.world_size

    def get_data_parallel_group(self) -> Any:
        """The torch process group of all ranks; None for one rank that is not sharded."""
        return None if self.sharding is None else self.sharding.mesh.get_group()

    def _is_value_model(self) -> bool:
        return self.setup.model_type == "value_model"

    def _named_tensors(self) -> dict[str, Tensor]:
        if self.sharding is not None:
            self.sharding.reshard()
        return parameters_by_name(self.module)

    def _optim(self) -> Any:
        if self.setup.optim is None:
            raise TypeError("this engine was built without optim: it gives log-probs or values, and cannot train")
        return self.setup.optim

    def _trained(self) -> torch.optim.AdamW:
        self._optim()
        if self.optimizer is None:
            raise RuntimeError("initialize() has to be called before the engine trains")
        return self.optimizer
