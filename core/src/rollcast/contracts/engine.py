"""Contracts of training engines and of their loss functions.

Axes: ``B`` rows, ``P`` prompt positions, ``T`` response positions. An engine accepts two kinds of batches. A jagged
batch is a DataProto with the jagged columns ``prompts`` and ``responses`` (int32), ``response_mask`` (bool) and the
columns that the loss reads; the engine pads its micro-batches on its device. Trainers send this kind. A padded batch
has ``input_ids``, ``attention_mask``, ``position_ids`` int64 ``[B, P + T]`` (prompts left-padded, responses
right-padded), ``responses`` int64 ``[B, T]`` and ``response_mask`` ``[B, T]``.
``rollcast_engine.batching.plan_batch`` handles both kinds.

Either kind may have the object column ``multi_modal_data`` with the images of each row, as in
:class:`rollcast.contracts.rollout.RolloutRequest`, or None. The engine makes ``pixel_values``, ``image_grid_thw`` and
positions on three axes from it, for the rows of each micro-batch; an engine that does not must refuse the column.

Micro-batching, packing and gradient accumulation happen inside the engine. A loss function sees per-token quantities
but never logits, so it runs unchanged on tensor- and pipeline-parallel engines. It divides by counts over the whole
mini-batch, so that the gradient does not depend on the split into micro-batches. Example::

    def supervised(inputs: LossInputs) -> LossOutput:
        nll = -(inputs.log_probs * inputs.response_mask).sum() / inputs.denominators.tokens
        return LossOutput(nll, {"actor/nll": nll.detach()})
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from rollcast.contracts.algorithm import Denominators
from rollcast.contracts.config import Fraction, Ge, Gt, Len, NonNegative, OrInfinity, Positive, config
from rollcast.contracts.storage import ModelPath, NodePath
from rollcast.errors import CapabilityError
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
    "ModelType",
    "OptimConfig",
    "TrainOutput",
    "engines",
]

ModelType = Literal["language_model", "value_model"]


@config
class ModelConfig:
    """A model's Hugging Face folder and the options for loading it."""

    path: ModelPath = "???"
    """Folder with `config.json` and a tokenizer, and with weights unless `random_init`; or a GGUF file or a folder with
    one, which is converted; or a URL of these, such as `s3://bucket/model`, which is copied to each node."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Changes of the folder's `config.json` for trainer and rollout, such as `{rope_theta: 1000000}`."""
    use_shm: bool = False
    """Copy the folder to shared memory (`/dev/shm`) on each node."""
    random_init: bool = False
    """Start from random weights drawn with `trainer.seed`."""
    attn_implementation: str = "sdpa"
    """Attention implementation of transformers, such as `sdpa` or `eager`."""
    trust_remote_code: bool = False
    """Allow the folder's own Python code."""
    use_liger: bool = False
    """Run norms, rotary embedding and feed-forward with Liger's kernels on CUDA devices."""
    lora_rank: NonNegative = 0
    """Rank of the LoRA adapter to train instead of the model; 0 to train the model."""
    lora_alpha: Positive = 16
    """Scale of the adapter: its output is multiplied by `lora_alpha / lora_rank`."""
    target_modules: Any = "all-linear"
    """Modules that the adapter changes: names of linear layers, a regular expression, or `all-linear` for all but the
    vocabulary head."""
    lora_adapter_path: NodePath | None = None
    """Adapter folder in PEFT's format to start from, with its own rank, alpha and targets; or its URL."""

    @property
    def trains_adapter(self) -> bool:
        """True if a LoRA adapter is trained instead of the model."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None

    def without_adapter(self) -> ModelConfig:
        """Return the config of the same model without an adapter."""
        return replace(self, lora_rank=0, lora_adapter_path=None)


@config
class OptimConfig:
    """An optimizer and its learning-rate schedule. Names are verl's where verl has the key."""

    optimizer: str = "adamw"
    """Registry name of the optimizer."""
    optimizer_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further options of the optimizer."""
    lr: Annotated[float, Ge(0)] = 1e-6
    """Peak learning rate."""
    lr_warmup_steps: int = -1
    """Steps of linear warm-up from `lr / lr_warmup_steps`; -1 for `lr_warmup_steps_ratio`."""
    lr_warmup_steps_ratio: Fraction = 0.0
    """Warm-up steps as a share of `total_training_steps`."""
    lr_scheduler_type: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Schedule after the warm-up: `constant`, `linear` or `cosine` decay, or `wsd` (warm-up, stable, decay), which
    decays in the last steps only."""
    lr_wsd_decay_steps: Positive | None = None
    """Steps of the `wsd` decay; null for a tenth of `total_training_steps`."""
    lr_wsd_decay_style: Literal["linear", "cosine", "minus_sqrt"] = "linear"
    """Shape of the `wsd` decay: `linear`, `cosine` or `minus_sqrt`."""
    min_lr_ratio: Fraction = 0.0
    """Ratio of the final learning rate to `lr`."""
    total_training_steps: int = -1
    """Length of the schedule in steps; -1 for the length of the run."""
    betas: Annotated[list[float], Len(2, 2)] = field(default_factory=lambda: [0.9, 0.999])
    """AdamW's betas."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.01
    """Weight decay: decoupled for AdamW, added to the gradient for SGD."""
    clip_grad: Annotated[float, Gt(0), OrInfinity()] = 1.0
    """Largest norm of the gradient; `inf` for no clipping."""


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a loss function for one micro-batch; tensors are ``[B, T]`` on the engine's device.

    Attributes:
        log_probs: log-probs of the response tokens, with gradient; None for a value model.
        entropy: entropy of the policy at each position, if requested.
        values: values of a value model, with gradient.
        response_mask: 1 where the policy chose the token.
        columns: all other tensor columns of the batch, such as ``advantages``.
        denominators: counts over the whole mini-batch on all data-parallel ranks.
        vocabulary_kl: KL penalty between policy and reference, with gradient, if requested.
    """

    log_probs: Tensor | None
    entropy: Tensor | None
    values: Tensor | None
    response_mask: Tensor
    columns: Mapping[str, Tensor]
    denominators: Denominators
    vocabulary_kl: Tensor | None = None


@dataclass(frozen=True)
class LossOutput:
    """A micro-batch's share of the loss, ``metrics`` to sum and ``maxima`` to maximize over micro-batches and ranks."""

    loss: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    maxima: Mapping[str, Tensor] = field(default_factory=dict)


class LossFunction(Protocol):
    """A function from a micro-batch's per-token quantities to the micro-batch's share of the loss."""

    def __call__(self, inputs: LossInputs) -> LossOutput: ...


@dataclass(frozen=True)
class EngineCapabilities:
    """Features of an engine; checked against the rollout and the weight sync before the run starts.

    Attributes:
        routing_replay: True if the engine records and replays the choices of a mixture's routers.
        weight_mixing: True if :meth:`BaseEngine.mix_weights` works.
        max_world_size: largest number of ranks that can share a model; None for no limit.
    """

    value_model: bool = False
    sum_pi_squared: bool = False
    vocabulary_kl: bool = False
    in_process_module: bool = False
    token_budget: bool = False
    lora: bool = False
    offload: bool = False
    tensor_parallel: bool = False
    pipeline_parallel: bool = False
    routing_replay: bool = False
    weight_mixing: bool = False
    max_world_size: int | None = None


@dataclass(frozen=True)
class EngineSetup:
    """Constructor arguments of an engine.

    Attributes:
        model_type: ``language_model`` computes log-probs, ``value_model`` computes values.
        model: model to load.
        engine: engine's own keys (``actor.engine``), an instance of its ``config_schema``.
        optim: optimizer and schedule; None for an engine that is never trained, such as a reference policy.
        context: rank, world size and rendezvous of the worker that hosts the engine.
        seed: seed of random initial weights, the same on all ranks.
        section: config section of the role, such as ``critic``; used in error messages.
    """

    model_type: ModelType
    model: ModelConfig
    engine: Any
    optim: OptimConfig | None
    context: WorkerContext
    seed: int = 0
    section: str = "actor"


@dataclass(frozen=True)
class ForwardSettings:
    """Settings for one pass of a batch through the model.

    Attributes:
        temperature: divisor of the logits, applied before log-probs and entropy are computed.
        calculate_entropy: True to compute the entropy at each position too.
        calculate_sum_pi_squared: True to compute ``sum_pi_squared`` ``[B, T]`` too, the sum of the squared
            probabilities at each position.
        vocabulary_kl: name in ``rollcast.kl_penalties`` of a penalty over the whole vocabulary; it is computed at
            each position (``vocabulary_kl`` ``[B, T]``) against the model of :meth:`BaseEngine.set_reference`.
        record_routing: True to output the column ``routed_experts`` too, for a mixture of experts: the choices of its
            routers, jagged int16 ``[prompt and response tokens, layers with experts, experts of a token]``, -1 for each
            row's last token. A batch with this column replays the choices.
        micro_batch_size_per_gpu: rows per micro-batch; None for all rows at once.
        max_token_len_per_gpu: tokens per micro-batch on each rank, including padding unless the engine packs;
            takes precedence over ``micro_batch_size_per_gpu``.
        max_response_length: constant of the ``seq-mean-token-sum-norm`` aggregation; None for the batch's ``T``.
        denominators: counts over the whole mini-batch, from a caller that removed rows without effect; None
            to count over the batch and all ranks, each count at least 1.
    """

    temperature: float = 1.0
    calculate_entropy: bool = False
    calculate_sum_pi_squared: bool = False
    vocabulary_kl: str | None = None
    record_routing: bool = False
    micro_batch_size_per_gpu: int | None = None
    max_token_len_per_gpu: int | None = None
    max_response_length: int | None = None
    denominators: Denominators | None = None


@dataclass(frozen=True)
class TrainOutput:
    """Result of one optimizer step, equal on every rank.

    ``grad_norm`` is the norm before clipping; ``skipped`` is True if a norm that is not finite made the engine skip
    the step.
    """

    grad_norm: float
    lr: float
    skipped: bool
    metrics: Mapping[str, float]


class BaseEngine(ABC):
    """Base class of engines: a model, its optimizer and its schedule on one rank of a worker group.

    All ranks call every method together. The constructor stays cheap: load the model in :meth:`initialize`.
    """

    capabilities: ClassVar[EngineCapabilities] = EngineCapabilities()
    #: Dataclass of the engine's own config keys; importable without torch.
    config_schema: ClassVar[type]

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup

    @classmethod
    def compute_dtype(cls, config: Any) -> str | None:  # noqa: ARG003  # for subclasses
        """Return torch's name of the dtype of forward passes, such as ``bfloat16``; None if unknown.

        Args:
            config: engine's own keys, an instance of ``config_schema``.
        """
        return None

    @abstractmethod
    def initialize(self) -> None:
        """Build the model, optimizer and scheduler, and join the process group if there are several ranks."""

    @abstractmethod
    def train_mode(self) -> AbstractContextManager[None]:
        """Return a context in which dropout is on and the weights are on the device.

        Gradients last until the outermost context ends; an engine may drop them then.
        """

    @abstractmethod
    def eval_mode(self) -> AbstractContextManager[None]:
        """Return a context in which dropout and gradients are off."""

    @abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Clear all gradients."""

    @abstractmethod
    def optimizer_step(self) -> tuple[float, bool]:
        """Clip the gradient and take an optimizer step; skip the step if the gradient's norm is not finite.

        Returns:
            The gradient's global norm before clipping, and True if the step was skipped.
        """

    @abstractmethod
    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one step and return the new learning rate."""

    @abstractmethod
    def forward_backward_batch(
        self,
        data: DataProto,
        loss_function: LossFunction | None,
        settings: ForwardSettings,
        forward_only: bool = False,
    ) -> tuple[DataProto | None, dict[str, float]]:
        """Run this rank's rows through the model, micro-batch by micro-batch, and accumulate gradients.

        Returns:
            A pair. First, with ``forward_only``, a DataProto with one row per row of ``data``, in order, else None.
            Its columns are ``log_probs`` (and the other quantities requested in ``settings``) or ``values``: float32,
            zero where the mask is 0, with the row lengths of ``responses``, or ``[B, T]`` for a padded batch.
            Second, the loss function's metrics, reduced over micro-batches and data-parallel ranks.
        """

    @abstractmethod
    def current_lr(self) -> float:
        """Return the learning rate of the next optimizer step."""

    def train_batch(self, data: DataProto, loss_function: LossFunction, settings: ForwardSettings) -> TrainOutput:
        """Take one optimizer step on this rank's rows of a mini-batch."""
        self.optimizer_zero_grad()
        _, metrics = self.forward_backward_batch(data, loss_function, settings)
        lr = self.current_lr()
        grad_norm, skipped = self.optimizer_step()
        return TrainOutput(grad_norm, lr, skipped, metrics)

    def infer_batch(
        self, data: DataProto, settings: ForwardSettings, loss_function: LossFunction | None = None
    ) -> tuple[DataProto, dict[str, float]]:
        """Compute per-token quantities without gradient; return them and the metrics of ``loss_function``, if any."""
        output, metrics = self.forward_backward_batch(data, loss_function, settings, forward_only=True)
        if output is None:
            raise TypeError(f"{type(self).__name__}.forward_backward_batch(forward_only=True) returned no output")
        return output, metrics

    @abstractmethod
    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the base model's full parameters by their Hugging Face names, gathered over the ranks."""

    def get_adapter(self) -> AdapterWeights | None:
        """Return the LoRA adapter in training, gathered over the ranks; None if the model itself is trained."""
        return None

    def in_process_module(self) -> AbstractContextManager[nn.Module]:
        """Return a context that yields the module with full weights on this rank, for generation in this process.

        Inside the context, a rank may run the module without the other ranks.

        Raises:
            CapabilityError: the engine lacks ``capabilities.in_process_module``.
        """
        raise CapabilityError(f"{type(self).__name__} has no module that can generate in its own process")

    @abstractmethod
    def to(self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move the selected state to ``device`` (``cpu`` or the accelerator)."""

    @abstractmethod
    def save_checkpoint(self, path: Path) -> None:
        """Write the model, the optimizer, the schedule and this rank's random state under ``path``."""

    def start_checkpoint(self, path: Path) -> None:
        """Start an asynchronous checkpoint; complete it with :meth:`finish_checkpoint`.

        The engine's state may change as soon as this method returns. The default implementation writes the whole
        checkpoint before it returns.

        Raises:
            CheckpointError: this checkpoint cannot be started, or the previous one failed.
        """
        self.save_checkpoint(path)

    def finish_checkpoint(self, wait: bool) -> bool:
        """Return True if the checkpoint of :meth:`start_checkpoint` is on disk; block until then if ``wait``.

        Runs no collective operation.

        Raises:
            CheckpointError: the checkpoint could not be written; raised only once.
        """
        return True

    @abstractmethod
    def load_checkpoint(self, path: Path) -> None:
        """Load a checkpoint written by :meth:`save_checkpoint`.

        Raises:
            CheckpointError: a part is missing or belongs to another model; names the part.
        """

    @abstractmethod
    def export(self, path: Path) -> None:
        """Write a Hugging Face folder (config, safetensors, tokenizer) from the live model."""

    @classmethod
    @abstractmethod
    def export_checkpoint(cls, checkpoint: Path, model: ModelConfig, output: Path) -> None:
        """Convert a checkpoint to a Hugging Face folder, in one process.

        Raises:
            CheckpointError: the checkpoint was not written by this engine.
        """

    @abstractmethod
    def get_data_parallel_rank(self) -> int:
        """Return the index of this rank's shard of a batch."""

    @abstractmethod
    def get_data_parallel_size(self) -> int:
        """Return the number of shards of a batch."""

    @abstractmethod
    def get_data_parallel_group(self) -> Any:
        """Return the data-parallel process group of torch; None if there is only one rank."""

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Return True if this rank returns the outputs of its model-parallel group."""
        return True

    def set_reference(self, reference: BaseEngine) -> None:
        """Set the reference engine for ``ForwardSettings.vocabulary_kl``.

        The reference must be initialized, be in the same process on the same ranks, have the same vocabulary, and
        have its weights on the device whenever the KL is computed.

        Raises:
            CapabilityError: the engines cannot compute a KL over the vocabulary.
        """
        raise CapabilityError(f"{type(self).__name__} computes no KL penalty over the vocabulary")

    def mix_weights(self, source: BaseEngine, share: float) -> None:
        """Replace each weight by ``(1 - share) · weight + share · the source's``.

        Args:
            source: an initialized engine with the same config and model, in the same process on the same ranks.
            share: share of the source, 0 to 1.

        Raises:
            CapabilityError: the engine lacks ``capabilities.weight_mixing``, or the source has another model or layout.
        """
        raise CapabilityError(f"{type(self).__name__} cannot mix its weights with those of another engine")

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Return a context in which the base model runs without its adapter.

        Raises:
            CapabilityError: the engine has no adapter.
        """
        raise CapabilityError(f"{type(self).__name__} holds no adapter")


engines: Registry[type[BaseEngine]] = Registry(
    "rollcast.engines",
    subclass_of(BaseEngine),
    "actor.engine.name",
    description="training engines: model, optimizer and their parallelism",
)
