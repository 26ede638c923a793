"""The contract of training engines: forward, backward and the optimizer over a sharded model.

Axes: ``B`` rows, ``P`` prompt positions, ``T`` response positions. A batch is a DataProto with
``input_ids``, ``attention_mask``, ``position_ids`` int64 ``[B, P + T]`` (prompts left-padded,
responses right-padded), ``responses`` int64 ``[B, T]`` and ``response_mask`` ``[B, T]``.

Micro-batching, packing and gradient accumulation happen inside the engine. A loss function sees
per-token quantities, never logits, so that it runs unchanged on tensor- and pipeline-parallel
engines; its share of the loss is already divided by counts over the whole mini-batch, so that an
update has the same gradient however the batch was split.

Example of a loss function::

    def supervised(inputs: LossInputs) -> LossOutput:
        nll = -(inputs.log_probs * inputs.response_mask).sum() / inputs.denominators.tokens
        return LossOutput(nll, {"actor/nll": nll.detach()})
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rollcast.contracts.algorithm import Denominators
from rollcast.contracts.loss import LossFunction, LossInputs, LossOutput
from rollcast.contracts.optim import OptimConfig
from rollcast.plugins import Registry, subclass_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rollcast.contracts.weights import AdapterWeights
    from rollcast.contracts.worker import WorkerContext
    from rollcast.protocol import DataProto

__all__ = [
    "BaseEngine",
    "EngineCapabilities",
    "EngineSetup",
    "ForwardSettings",
    "LossFunction",
    "LossInputs",
    "LossOutput",
    "ModelConfig",
    "OptimConfig",
    "TrainOutput",
    "engines",
]

ModelType = Literal["language_model", "value_model"]


@dataclass
class ModelConfig:
    """The config's ``model`` section: which Hugging Face folder, and how it is loaded.

    Attributes:
        path: folder with ``config.json`` and a tokenizer, and with weights unless ``random_init``.
        random_init: start from random weights drawn with ``trainer.seed``.
        attn_implementation: transformers' name of the attention, such as ``sdpa`` or ``eager``.
        trust_remote_code: allow the folder's own Python code.
        use_liger: run norms, rotary embedding and feed-forward by Liger's kernels, on CUDA devices.
        lora_rank: train a LoRA adapter of this rank, and not the model itself; 0 for none. Names are verl's.
        lora_alpha: the adapter's part is scaled by ``lora_alpha / lora_rank``.
        target_modules: which modules it adapts: names of linear layers, a regular expression, or
            ``all-linear`` for all but the vocabulary head.
        lora_adapter_path: a folder in PEFT's format to start from, whose rank, alpha and targets are taken.
    """

    path: str = "???"
    random_init: bool = False
    attn_implementation: str = "sdpa"
    trust_remote_code: bool = False
    use_liger: bool = False
    lora_rank: int = 0
    lora_alpha: int = 16
    target_modules: Any = "all-linear"
    lora_adapter_path: str | None = None

    @property
    def trains_adapter(self) -> bool:
        """Whether what trains is a LoRA adapter."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None

    def without_adapter(self) -> ModelConfig:
        """The same model, to be trained itself, or not at all."""
        return replace(self, lora_rank=0, lora_adapter_path=None)


@dataclass(frozen=True)
class EngineCapabilities:
    """What an engine can do; compared with the rollout's and the sync's before anything starts."""

    value_model: bool = False
    sum_pi_squared: bool = False
    vocabulary_kl: bool = False
    in_process_module: bool = False
    token_budget: bool = False
    packing: bool = False
    lora: bool = False
    offload: bool = False
    tensor_parallel: bool = False
    pipeline_parallel: bool = False


@dataclass(frozen=True)
class EngineSetup:
    """Everything an engine is built from.

    Attributes:
        model_type: ``language_model`` gives log-probs, ``value_model`` gives values.
        model: which model to load.
        engine: the engine's own keys (``actor.engine``), an instance of its ``config_schema``.
        optim: None for an engine that is never trained, such as a reference policy.
        context: rank, world size and rendezvous of the worker that hosts the engine.
        seed: for random initial weights; the same on all ranks.
    """

    model_type: ModelType
    model: ModelConfig
    engine: Any
    optim: OptimConfig | None
    context: WorkerContext
    seed: int = 0


@dataclass(frozen=True)
class ForwardSettings:
    """How a batch goes through the model.

    Attributes:
        temperature: logits are divided by it before log-probs and entropy.
        calculate_entropy: give per-token entropy too.
        calculate_sum_pi_squared: give the sum of the squared probabilities at each position too
            (``sum_pi_squared`` ``[B, T]``), which some advantage estimators need.
        vocabulary_kl: name in ``rollcast.kl_penalties`` of a penalty that needs the whole vocabulary, to
            be given at each position (``vocabulary_kl`` ``[B, T]``) between this engine's model and
            that of :meth:`BaseEngine.set_reference`, whose logits live no longer than a micro-batch.
        micro_batch_size_per_gpu: rows a micro-batch; None for all rows at once.
        max_token_len_per_gpu: tokens a micro-batch on each rank, with padding unless it packs; takes precedence.
        max_response_length: the constant of the ``seq-mean-token-sum-norm`` aggregation; None
            stands for the batch's own ``T``.
        denominators: counts of the whole mini-batch, given by a caller who has left rows out of
            the batch that would add nothing; None counts them over the batch and all ranks, each
            at least 1.
    """

    temperature: float = 1.0
    calculate_entropy: bool = False
    calculate_sum_pi_squared: bool = False
    vocabulary_kl: str | None = None
    micro_batch_size_per_gpu: int | None = None
    max_token_len_per_gpu: int | None = None
    max_response_length: int | None = None
    denominators: Denominators | None = None


@dataclass(frozen=True)
class TrainOutput:
    """One optimizer step, the same on every rank: the norm of the gradient before clipping, the
    learning rate used, whether the step was skipped because the gradient was not finite, and the
    loss function's metrics over the whole mini-batch.
    """

    grad_norm: float
    lr: float
    skipped: bool
    metrics: Mapping[str, float]


class BaseEngine(ABC):
    """A model, its optimizer and its schedule, on one rank of a worker group.

    Every method is called by all ranks together. Nothing heavy happens before :meth:`initialize`.
    """

    capabilities: ClassVar[EngineCapabilities] = EngineCapabilities()
    #: Dataclass of the engine's own config keys; importable without torch.
    config_schema: ClassVar[type]

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup

    @abstractmethod
    def initialize(self) -> None:
        """Build model, optimizer and scheduler; joins the process group if there are more ranks."""

    @abstractmethod
    def train_mode(self) -> AbstractContextManager[None]:
        """Dropout on, weights on the device, for the calls inside."""

    @abstractmethod
    def eval_mode(self) -> AbstractContextManager[None]:
        """Dropout off and no gradient, for the calls inside."""

    @abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Forget all gradients."""

    @abstractmethod
    def optimizer_step(self) -> tuple[float, bool]:
        """Clip and step; gives the gradient's global norm before clipping, and whether the step
        was skipped because that norm is not finite.
        """

    @abstractmethod
    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one; gives the learning rate from now on."""

    @abstractmethod
    def forward_backward_batch(
        self,
        data: DataProto,
        loss_function: LossFunction | None,
        settings: ForwardSettings,
        forward_only: bool = False,
    ) -> tuple[DataProto | None, dict[str, float]]:
        """Run a rank's rows, micro-batch by micro-batch, accumulating gradients.

        Returns:
            With ``forward_only``, a DataProto in the order of ``data``'s rows: ``log_probs`` (and what
            else the settings ask for) or ``values``, float32 ``[B, T]``, zero under a zero mask. Otherwise None.
            And the loss function's metrics, reduced over micro-batches and data-parallel ranks.
        """

    @abstractmethod
    def current_lr(self) -> float:
        """The learning rate that the next optimizer step uses."""

    def train_batch(self, data: DataProto, loss_function: LossFunction, settings: ForwardSettings) -> TrainOutput:
        """One optimizer step on a mini-batch (this rank's rows of it)."""
        self.optimizer_zero_grad()
        _, metrics = self.forward_backward_batch(data, loss_function, settings)
        lr = self.current_lr()
        grad_norm, skipped = self.optimizer_step()
        return TrainOutput(grad_norm, lr, skipped, metrics)

    def infer_batch(
        self, data: DataProto, settings: ForwardSettings, loss_function: LossFunction | None = None
    ) -> tuple[DataProto, dict[str, float]]:
        """Per-token quantities without gradient, and the loss function's metrics if one is given."""
        output, metrics = self.forward_backward_batch(data, loss_function, settings, forward_only=True)
        if output is None:
            raise TypeError(f"{type(self).__name__}.forward_backward_batch(forward_only=True) gave no output")
        return output, metrics

    @abstractmethod
    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """Full parameters by their Hugging Face names, one at a time, gathered over the ranks.

        With an adapter in training these are the base model's.
        """

    def get_adapter(self) -> AdapterWeights | None:
        """The LoRA adapter in training, gathered over the ranks (all call it); None if the model itself trains."""
        return None

    def in_process_module(self) -> AbstractContextManager[nn.Module]:
        """The module with full weights in place on this rank, for generation in this process.

        Inside the context a rank may run it alone; no collective is needed.

        Raises:
            CapabilityError: the engine cannot (``capabilities.in_process_module`` is False).
        """
        from rollcast.errors import CapabilityError

        raise CapabilityError(f"{type(self).__name__} has no module that can generate in its own process")

    @abstractmethod
    def to(self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move the named state to ``device`` (``cpu`` or the accelerator)."""

    @abstractmethod
    def save_checkpoint(self, path: Path) -> None:
        """Write model, optimizer, schedule and this rank's RNG under ``path`` (all ranks, one call)."""

    def start_checkpoint(self, path: Path) -> None:
        """Begin what :meth:`save_checkpoint` does; the state may change again once this returns.

        An engine that cannot write while it trains writes everything here.

        Raises:
            CheckpointError: it could not be begun, or the one begun before could not be written.
        """
        self.save_checkpoint(path)

    def finish_checkpoint(self, wait: bool) -> bool:  # for those that override it
        """Whether what :meth:`start_checkpoint` began is on the disk; on each rank by itself.

        Args:
            wait: until it is.

        Raises:
            CheckpointError: it could not be written; said once.
        """
        return True

    @abstractmethod
    def load_checkpoint(self, path: Path) -> None:
        """Load what :meth:`save_checkpoint` wrote.

        Raises:
            CheckpointError: the folder is incomplete, or of another model; names what differs.
        """

    @abstractmethod
    def export(self, path: Path) -> None:
        """Write a Hugging Face folder (config, safetensors, tokenizer) from the live model."""

    @classmethod
    @abstractmethod
    def export_checkpoint(cls, checkpoint: Path, model: ModelConfig, output: Path) -> None:
        """Turn a checkpoint of this engine into a Hugging Face folder, in one process.

        Raises:
            CheckpointError: the checkpoint is incomplete or of another engine.
        """

    @abstractmethod
    def get_data_parallel_rank(self) -> int:
        """Which shard of a batch this rank works on."""

    @abstractmethod
    def get_data_parallel_size(self) -> int:
        """Into how many shards a batch is split."""

    @abstractmethod
    def get_data_parallel_group(self) -> Any:
        """The torch process group of the ranks that hold different shards; None for one rank."""

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether this rank's outputs are the ones to collect of its model-parallel group."""
        return True

    def set_reference(self, reference: BaseEngine) -> None:
        """Take the engine whose model ``ForwardSettings.vocabulary_kl`` is measured against.

        Args:
            reference: initialized, in the same process, on the same ranks, of the same vocabulary. Its
                weights are on the device whenever this engine is asked for that quantity.

        Raises:
            CapabilityError: the engine cannot (``capabilities.vocabulary_kl`` is False), or not with this one.
        """
        from rollcast.errors import CapabilityError

        raise CapabilityError(f"{type(self).__name__} gives no KL penalty over the vocabulary")

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Run the base model without its adapter.

        Raises:
            CapabilityError: there is no adapter.
        """
        from rollcast.errors import CapabilityError

        raise CapabilityError(f"{type(self).__name__} holds no adapter")


engines: Registry[type[BaseEngine]] = Registry(
    "rollcast.engines",
    subclass_of(BaseEngine),
    "actor.engine.name",
    description="training engines: model, optimizer and their parallelism",
)
