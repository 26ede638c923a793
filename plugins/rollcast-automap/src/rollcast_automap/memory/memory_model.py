"""The memory of models on each rank, from ``config.json`` and the settings.

Weights, gradients, optimizer state and the KV cache are counted exactly; activations are a rough upper bound.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollcast.contracts.engine import ModelConfig
from rollcast.errors import ConfigError
from rollcast_automap.memory.engine_layout import EngineLayout
from rollcast_serving.adapters import adapter_rank, read_adapter_config

__all__ = [
    "MemoryItem",
    "ModelSize",
    "Passes",
    "Phase",
    "FORWARD_LOGIT_COPIES",
    "KL_LOGIT_COPIES",
    "LOGIT_COPIES",
    "bound_activations",
    "bound_forward",
    "bound_logits",
    "count_adapter",
    "count_adapter_state",
    "count_frozen",
    "count_gathered",
    "count_kv_cache",
    "count_trained",
    "count_unreduced",
    "measure_model",
    "parameters_on_rank",
]

#: Phase in which an item takes memory; ``held`` means throughout.
Phase = Literal["held", "generate", "forward", "update", "sync"]

#: float32 copies of the logits that exist at once: the logits, the logits over the temperature, and the gradient.
LOGIT_COPIES = 3
#: float32 copies of the logits that exist at once in a pass without gradient.
FORWARD_LOGIT_COPIES = 2
#: Additional copies for a KL penalty over the vocabulary: reference logits, log-probs, ratios and their products.
KL_LOGIT_COPIES = 6


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a causal language model.

    Attributes:
        parameters: number of all parameters; tied ones count once.
        value_parameters: number of parameters with a value head instead of the vocabulary head.
        layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary: sizes from the model's config;
            ``intermediate`` is the feed-forward width per token, in a mixture the total of a token's experts.
    """

    parameters: int
    value_parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @property
    def body(self) -> int:
        """Parameters without any head."""
        return self.value_parameters - self.hidden - 1

    @property
    def layer(self) -> int:
        """Parameters of one layer, on average."""
        return (self.body - self.vocabulary * self.hidden) // max(self.layers, 1)


@dataclass(frozen=True)
class MemoryItem:
    """An item that takes memory on a rank.

    Attributes:
        name: role and content, such as ``actor: gradients``.
        bytes: bytes on each rank.
        phase: phase in which the item takes memory; ``held`` for all phases.
        on_host: True if the item is in host memory and on the device only while in use.
        is_bound: True if ``bytes`` is a rough upper bound, not a count.
    """

    name: str
    bytes: int
    phase: Phase = "held"
    on_host: bool = False
    is_bound: bool = False


@dataclass(frozen=True)
class Passes:
    """The largest forward and backward pass of a rank: rows, and the tokens of the longest row and response."""

    rows: int
    row_tokens: int
    response_tokens: int


def measure_model(model: ModelConfig, key: str = "model.path") -> ModelSize:
    """Return the sizes of the model in ``model.path``, which is built without memory for its weights.

    Args:
        model: model to measure.
        key: config key of the model's folder, for messages.

    Raises:
        ConfigError: the folder has no ``config.json``, transformers knows no causal language model for it, or the model
            has a vision tower.
    """
    import torch
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    folder = Path(model.path)
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "is not a folder"
        raise ConfigError(f"{key}: {folder} {what}; give a Hugging Face model folder")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
        if getattr(config, "vision_config", None) is not None:
            raise ConfigError(
                f"{key}: the memory of the model in {folder} cannot be counted: model_type={config.model_type} has a "
                "vision tower, whose activations depend on the images"
            )
        with torch.device("meta"):
            module = auto.from_config(config, trust_remote_code=model.trust_remote_code)
    except (ValueError, KeyError, OSError, AttributeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]  # transformers lists several hundred classes below
        raise ConfigError(
            f"{key}: {folder / 'config.json'} does not describe a causal language model: {reason}"
        ) from error
    text: Any = config.get_text_config()
    heads = int(text.num_attention_heads)
    body = getattr(module, module.base_model_prefix, module)
    return ModelSize(
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        value_parameters=sum(parameter.numel() for parameter in body.parameters()) + text.hidden_size + 1,
        layers=int(text.num_hidden_layers),
        hidden=int(text.hidden_size),
        intermediate=_intermediate(text),
        heads=heads,
        kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
        vocabulary=int(text.vocab_size),
    )


def _intermediate(text: Any) -> int:
    dense = int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    experts = int(getattr(text, "num_experts_per_tok", None) or 0)
    return max(dense, experts * int(getattr(text, "moe_intermediate_size", None) or dense))


def parameters_on_rank(size: ModelSize, layout: EngineLayout, value_model: bool = False) -> int:
    """Return the parameters on the fullest rank; in a pipeline, a rank of the first or the last stage."""
    whole = size.value_parameters if value_model else size.parameters
    if layout.pipeline > 1:
        whole = -(-size.layer * size.layers // layout.pipeline) + size.vocabulary * size.hidden
    return layout.shard(whole)


def count_trained(name: str, parameters: int, layout: EngineLayout) -> list[MemoryItem]:
    """Return weights, gradients and AdamW state of a model that trains, with ``parameters`` on each rank."""
    gradient = layout.stored if layout.gradient is None else layout.gradient
    state = 2 * layout.stored if layout.state is None else layout.state
    state_bytes = -(-parameters * state // layout.state_shards)
    return [
        MemoryItem(f"{name}: parameters", parameters * layout.stored, on_host=layout.param_offload),
        MemoryItem(f"{name}: gradients", parameters * gradient, "held" if layout.keeps_gradients else "update"),
        MemoryItem(f"{name}: optimizer state", state_bytes, on_host=layout.optimizer_offload),
    ]


def count_adapter_state(name: str, numbers: int, layout: EngineLayout) -> list[MemoryItem]:
    """Return weights, gradients and AdamW state of an adapter, in float32 and sharded like the model."""
    shard_bytes = layout.shard(numbers) * 4
    return [
        MemoryItem(f"{name}: adapter", shard_bytes),
        MemoryItem(f"{name}: gradients", shard_bytes, "held" if layout.keeps_gradients else "update"),
        MemoryItem(f"{name}: optimizer state", 2 * shard_bytes),
    ]


def count_frozen(name: str, parameters: int, layout: EngineLayout) -> list[MemoryItem]:
    """Return the weights of a frozen model with ``parameters`` on each rank."""
    return [MemoryItem(f"{name}: parameters", parameters * layout.stored, on_host=layout.param_offload)]


def count_gathered(size: ModelSize, layout: EngineLayout, layers: int = 2) -> int:
    """Return the bytes of the weights that a pass gathers at a time: some layers, and all weights outside layers."""
    if not layout.gathers:
        return 0
    whole = size.parameters
    return layout.computed * (whole - max(size.layers - layers, 0) * size.layer if layout.reshards else whole)


def count_unreduced(size: ModelSize, layout: EngineLayout, value_model: bool = False) -> int:
    """Return the bytes of the gradients that an update has on each rank before they are reduced and sharded.

    They are those of a layer with the copy in float32 that is reduced, and those of the vocabulary head, which a value
    model does not have.
    """
    if not layout.gathers:
        return 0
    head = 0 if value_model else layout.computed * size.vocabulary * size.hidden
    return head + (layout.computed + 4) * size.layer


def count_kv_cache(
    size: ModelSize, rows: int, row_tokens: int, computed: int, tensor: int = 1, pipeline: int = 1
) -> int:
    """Return the bytes of the KV cache on each of ``tensor`` x ``pipeline`` devices.

    Args:
        size: sizes of the model.
        rows: sequences in the cache.
        row_tokens: tokens of each sequence.
        computed: bytes per element.
        tensor: devices that share the KV heads; with more devices than heads, each device holds one head.
        pipeline: stages that share the layers.
    """
    heads = max(-(-size.kv_heads // tensor), 1)
    return rows * row_tokens * 2 * -(-size.layers // pipeline) * heads * size.head_dim * computed


def bound_activations(size: ModelSize, passes: Passes, layout: EngineLayout, eager: bool) -> tuple[int, int]:
    """Return a bound of the activations of an update's largest pass in bytes: all kept, and those of the layer at work.

    A layer keeps four tensors of the feed-forward width, the queries three times, keys and values, and for each of its
    two norms the input in float32, the normalized input and the output; with ``eager`` attention also the attention
    matrix of every head three times. The layer whose backward pass runs has besides four gradients of the feed-forward
    width. With gradient checkpointing, a layer keeps only its input, and the layer at work has everything once more;
    with activation offload, only the layer at work counts. Sequence-parallel ranks share all of this; tensor-parallel
    ranks share the widths and heads. The first stage of a pipeline has as many micro-batches in flight as there are
    stages, so it keeps as much as if it had all layers; in an interleaved schedule, up to as much again, divided by the
    chunks of a stage.
    """
    tokens = -(-passes.rows * passes.row_tokens // layout.sequence_parts)
    whole = layout.tensor if layout.splits_sequence else 1
    projections = (3 * size.heads + 2 * size.kv_heads) * size.head_dim
    width = -(-tokens * size.intermediate * layout.computed // layout.tensor)
    layer = 4 * width - (-tokens * projections * layout.computed // layout.tensor)
    layer += -(-tokens * size.hidden * (4 * layout.computed + 8) // whole)
    if eager:
        layer += -(-size.heads * passes.row_tokens * tokens * (4 + 2 * layout.computed) // layout.tensor)
    gradients = 4 * width
    if layout.activation_offload:
        return 0, layer + gradients
    layers = size.layers
    if layout.chunks > 1:
        layers += -(-layers * (layout.pipeline - 1) // (layout.pipeline * layout.chunks))
    if not layout.checkpointing:
        return layers * layer, gradients
    return layers * -(-tokens * size.hidden * layout.computed // whole), layer + gradients


def bound_forward(size: ModelSize, passes: Passes, layout: EngineLayout, eager: bool) -> int:
    """Return a bound of the activations of the largest pass without gradient, in bytes: three tensors of the
    feed-forward width, three of the hidden size, and with ``eager`` attention the attention matrix of every head twice.
    """
    tokens = -(-passes.rows * passes.row_tokens // layout.sequence_parts)
    whole = layout.tensor if layout.splits_sequence else 1
    layer = 3 * -(-tokens * size.intermediate * layout.computed // layout.tensor)
    layer += 3 * -(-tokens * size.hidden * layout.computed // whole)
    if eager:
        layer += -(-size.heads * passes.row_tokens * tokens * (4 + layout.computed) // layout.tensor)
    return layer


def bound_logits(size: ModelSize, passes: Passes, layout: EngineLayout, copies: float = LOGIT_COPIES) -> int:
    """Return an upper bound of the logits of the largest pass in bytes: ``copies`` in float32 for response tokens.

    Fused logits are those of a chunk only (``head_positions``). With weights of two bytes, an update then also sums
    the gradient of the head in float32. Tensor-parallel ranks share the vocabulary.
    """
    positions = -(-passes.rows * passes.response_tokens // layout.sequence_parts)
    if layout.head_positions is not None:
        positions = min(positions, layout.head_positions)
    vocabulary = -(-size.vocabulary // layout.tensor)
    head = round(copies * 4 * positions * vocabulary)
    if layout.fused_logits and layout.computed < 4 and copies >= LOGIT_COPIES:
        head += 4 * vocabulary * size.hidden
    return head


def count_adapter(model: ModelConfig) -> int:
    """Return the number of parameters in the adapter that ``model`` trains; 0 without an adapter.

    Raises:
        ConfigError: ``model.lora_adapter_path`` holds no adapter, or no linear layer is chosen.
    """
    if not model.trains_adapter:
        return 0
    import torch
    import transformers
    from torch import nn

    targets = model.target_modules
    if model.lora_adapter_path is not None:
        targets = read_adapter_config(model.lora_adapter_path)["target_modules"]
    config = transformers.AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    auto: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        module = auto.from_config(config, trust_remote_code=model.trust_remote_code)
    head = module.get_output_embeddings()
    sizes = [
        part.in_features + part.out_features
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and part is not head and _is_target(name, targets)
    ]
    if not sizes:
        raise ConfigError(f"model.target_modules={targets} names no linear layer of the model in {model.path}")
    return adapter_rank(model) * sum(sizes)


def _is_target(name: str, targets: Any) -> bool:
    """Return True if PEFT would adapt this module: its name matches a regular expression, or ends with a target."""
    if isinstance(targets, str):
        return targets.lower() == "all-linear" or re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)
