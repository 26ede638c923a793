"""What the models of a run take in memory on each rank, from ``config.json`` and the settings alone.

Weights, gradients, optimizer state and the KV cache are counted; activations are a rough upper bound.
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
    "bound_logits",
    "count_adapter",
    "count_adapter_state",
    "count_frozen",
    "count_gathered",
    "count_kv_cache",
    "count_trained",
    "measure_model",
    "parameters_on_rank",
]

#: When an item takes memory: throughout, or only in a phase.
Phase = Literal["held", "generate", "forward", "update", "sync"]

#: float32 copies of the logits that exist at once: themselves, divided by the temperature, and the gradient.
LOGIT_COPIES = 3
#: The same without a gradient.
FORWARD_LOGIT_COPIES = 2
#: With ``use_fused_kernels``, bytes of the blocks of logits that exist at once, at most.
FUSED_LOGIT_BYTES = 4 * (1 << 22) * 4
#: What a KL penalty over the vocabulary adds: logits of the reference, log-probs, ratios and their products.
KL_LOGIT_COPIES = 6


@dataclass(frozen=True)
class ModelSize:
    """The numbers of a causal language model.

    Attributes:
        parameters: all of them, tied ones once.
        value_parameters: of the same model with a value head in place of the vocabulary head.
        layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary: from its config;
            ``intermediate`` is what one token goes through, so of the chosen experts together.
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
    """Something that takes memory on a rank.

    Attributes:
        name: what it is.
        bytes: on each rank.
        phase: ``held`` throughout, or only in a phase.
        on_host: in host memory, and on the device only while it is used.
        is_bound: a rough upper bound, not a count.
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
    """The numbers of the model in ``model.path``, built without memory for its weights.

    Args:
        model: which.
        key: where the config names its folder, for messages.

    Raises:
        ConfigError: the folder has no ``config.json``, or one that names no causal language model which
            transformers knows.
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
        with torch.device("meta"):
            module = auto.from_config(config, trust_remote_code=model.trust_remote_code)
    except (ValueError, KeyError, OSError, AttributeError, RuntimeError) as error:
        raise ConfigError(f"{key}: {folder / 'config.json'} gives no causal language model: {error}") from error
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
    """Parameters on the rank that has the most; of a pipeline that is its first stage or its last."""
    whole = size.value_parameters if value_model else size.parameters
    if layout.pipeline > 1:
        whole = -(-size.layer * size.layers // layout.pipeline) + size.vocabulary * size.hidden
    return layout.shard(whole)


def count_trained(name: str, parameters: int, layout: EngineLayout) -> list[MemoryItem]:
    """Weights, gradients and AdamW's state of a model in training, of which a rank has ``parameters``."""
    gradient = layout.stored if layout.gradient is None else layout.gradient
    state = 2 * layout.stored if layout.state is None else layout.state
    kept = -(-parameters * state // layout.state_shards)
    return [
        MemoryItem(f"{name}: parameters", parameters * layout.stored, on_host=layout.param_offload),
        MemoryItem(f"{name}: gradients", parameters * gradient),
        MemoryItem(f"{name}: optimizer state", kept, on_host=layout.optimizer_offload),
    ]


def count_adapter_state(name: str, numbers: int, layout: EngineLayout) -> list[MemoryItem]:
    """Weights, gradients and AdamW's state of an adapter, all in float32, over the ranks that share a copy."""
    each = layout.shard(numbers) * 4
    return [
        MemoryItem(f"{name}: adapter", each),
        MemoryItem(f"{name}: gradients", each),
        MemoryItem(f"{name}: optimizer state", 2 * each),
    ]


def count_frozen(name: str, parameters: int, layout: EngineLayout) -> list[MemoryItem]:
    """Weights of a model that is never trained, of which a rank has ``parameters``."""
    return [MemoryItem(f"{name}: parameters", parameters * layout.stored, on_host=layout.param_offload)]


def count_gathered(size: ModelSize, layout: EngineLayout) -> int:
    """Bytes of the weights that an update gathers at a time: what belongs to no layer, and two layers."""
    if not layout.gathers:
        return 0
    whole = size.parameters
    return layout.computed * (whole - max(size.layers - 2, 0) * size.layer if layout.reshards else whole)


def count_kv_cache(size: ModelSize, rows: int, row_tokens: int, computed: int, tensor: int = 1) -> int:
    """Bytes of keys and values of ``rows`` rows of the longest length, on each of ``tensor`` devices.

    Args:
        size: of the model.
        rows, row_tokens: of the cache.
        computed: bytes a number.
        tensor: devices that share the heads; beyond their number each keeps a copy of one.
    """
    heads = max(-(-size.kv_heads // tensor), 1)
    return rows * row_tokens * 2 * size.layers * heads * size.head_dim * computed


def bound_activations(size: ModelSize, passes: Passes, layout: EngineLayout, eager: bool) -> int:
    """A rough upper bound of what the layers of the largest pass keep for its backward, in bytes.

    A layer keeps four tensors of the feed-forward's width, four of the queries, keys and values, eight of
    the hidden size and four more of it in float32 (the norms), and with ``eager`` attention the matrix of
    every head three times. With gradient checkpointing a layer keeps its input, and one of them all. Ranks that
    share a sequence have a part of all this each, and those that share a layer a part of its widths and
    heads. With activation offload only the layer at work counts. The first stage of a pipeline has as many
    micro-batches under way as there are stages, so it keeps as much as if it had all layers.
    """
    tokens = -(-passes.rows * passes.row_tokens // layout.sequence_parts)
    whole = layout.tensor if layout.splits_sequence else 1
    projections = (size.heads + 2 * size.kv_heads) * size.head_dim
    split = -(-tokens * 4 * (size.intermediate + projections) * layout.computed // layout.tensor)
    layer = split + -(-tokens * size.hidden * (8 * layout.computed + 4 * 4) // whole)
    if eager:
        layer += -(-size.heads * passes.row_tokens * tokens * (4 + 2 * layout.computed) // layout.tensor)
    inputs = -(-tokens * size.hidden * layout.computed // whole)
    if layout.activation_offload:
        return layer
    return size.layers * inputs + layer if layout.checkpointing else size.layers * layer


def bound_logits(size: ModelSize, passes: Passes, layout: EngineLayout, copies: int = LOGIT_COPIES) -> int:
    """An upper bound of the logits of the largest pass: ``copies`` in float32 for response tokens, in bytes.

    Fused ones are a few blocks. Ranks that share a layer have a part of the vocabulary each.
    """
    positions = -(-passes.rows * passes.response_tokens // layout.sequence_parts)
    if layout.head_positions is not None:
        positions = min(positions, layout.head_positions)
    head = copies * 4 * positions * -(-size.vocabulary // layout.tensor)
    return min(head, FUSED_LOGIT_BYTES) if layout.fused_logits else head


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
    """True if PEFT would adapt this module: by regular expression, or by the end of its name."""
    if isinstance(targets, str):
        return targets.lower() == "all-linear" or re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)
