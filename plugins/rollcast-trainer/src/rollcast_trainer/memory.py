"""What the models of a run take in memory on each rank, from ``config.json`` and the settings alone.

Weights, gradients, optimizer state and the KV cache are counted; activations are a rough upper bound.
What libraries, the allocator and the CUDA context take is not in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollcast.contracts.engine import ModelConfig
from rollcast.errors import ConfigError

__all__ = [
    "EngineLayout",
    "MemoryItem",
    "ModelSize",
    "Passes",
    "KL_LOGIT_COPIES",
    "LOGIT_COPIES",
    "bound_activations",
    "count_frozen",
    "count_gathered",
    "count_kv_cache",
    "count_trained",
    "data_parallel_size",
    "measure_model",
    "total",
]

Phase = Literal["held", "generate", "update"]

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
#: float32 copies of the logits that exist at once: themselves, divided by the temperature, and the gradient.
LOGIT_COPIES = 3
#: With ``use_fused_kernels``, bytes of the blocks of logits that exist at once, at most.
FUSED_LOGIT_BYTES = 4 * (1 << 22) * 4
#: Keys of engines by which several ranks work on the same rows.
_MODEL_PARALLEL = ("ulysses_sequence_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size")
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
class EngineLayout:
    """How an engine keeps a model.

    Attributes:
        shards: ranks that share one copy.
        stored: bytes a stored parameter, gradient and number of the optimizer's state.
        computed: bytes a number in the forward and backward pass.
        param_offload, optimizer_offload: kept in host memory outside of their use.
        checkpointing: layers recompute their activations.
        activation_offload: what is kept for the backward pass is in host memory.
        sequence_parts: ranks that share the tokens of a row.
        fused_logits: logits are computed block by block, and never held.
        reshards: a layer's gathered weights are given up after its forward pass.
        known: the engine has the keys that this was read from; otherwise it is a guess.
    """

    shards: int
    stored: int = 4
    computed: int = 4
    param_offload: bool = False
    optimizer_offload: bool = False
    checkpointing: bool = False
    activation_offload: bool = False
    sequence_parts: int = 1
    fused_logits: bool = False
    reshards: bool = True
    known: bool = True

    @classmethod
    def read(cls, engine: Any, ranks: int) -> EngineLayout:
        """From the engine's own keys (``actor.engine``), by their usual names."""
        if not hasattr(engine, "model_dtype"):
            return cls(shards=1, known=False)
        stored = _BYTES.get(engine.model_dtype, 4)
        size = getattr(engine, "fsdp_size", -1)
        return cls(
            shards=ranks if size < 1 else size,
            stored=stored,
            computed=_BYTES.get(getattr(engine, "param_dtype", None) or engine.model_dtype, stored),
            param_offload=bool(getattr(engine, "param_offload", False)),
            optimizer_offload=bool(getattr(engine, "optimizer_offload", False)),
            checkpointing=bool(getattr(engine, "enable_gradient_checkpointing", False)),
            activation_offload=bool(getattr(engine, "enable_activation_offload", False)),
            sequence_parts=getattr(engine, "ulysses_sequence_parallel_size", 1),
            fused_logits=bool(getattr(engine, "use_fused_kernels", False)),
            reshards=bool(getattr(engine, "reshard_after_forward", True)),
        )

    @property
    def gathers(self) -> bool:
        """Whether passes need weights other than the stored ones."""
        return self.shards > 1 or self.computed != self.stored

    def shard(self, parameters: int) -> int:
        """Parameters on each rank."""
        return -(-parameters // self.shards)


@dataclass(frozen=True)
class MemoryItem:
    """Something that takes memory on a rank.

    Attributes:
        name: what it is.
        bytes: on each rank.
        phase: ``held`` throughout, or only to ``generate`` or to ``update``.
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


def data_parallel_size(engine: Any, ranks: int) -> int:
    """Into how many shards a batch is split, by the engine's own keys (``actor.engine``)."""
    return max(ranks // math.prod(int(getattr(engine, key, 1)) for key in _MODEL_PARALLEL), 1)


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


def count_trained(name: str, parameters: int, layout: EngineLayout) -> list[MemoryItem]:
    """Weights, gradients and AdamW's two moments of a model in training."""
    held = layout.shard(parameters) * layout.stored
    return [
        MemoryItem(f"{name}: parameters", held, on_host=layout.param_offload),
        MemoryItem(f"{name}: gradients", held),
        MemoryItem(f"{name}: optimizer state", 2 * held, on_host=layout.optimizer_offload),
    ]


def count_frozen(name: str, parameters: int, layout: EngineLayout) -> list[MemoryItem]:
    """Weights of a model that is never trained."""
    return [MemoryItem(f"{name}: parameters", layout.shard(parameters) * layout.stored, on_host=layout.param_offload)]


def count_gathered(size: ModelSize, layout: EngineLayout) -> int:
    """Bytes of the weights that an update gathers at a time: what belongs to no layer, and two layers."""
    if not layout.gathers:
        return 0
    whole = size.parameters
    return layout.computed * (whole - max(size.layers - 2, 0) * size.layer if layout.reshards else whole)


def count_kv_cache(size: ModelSize, rows: int, row_tokens: int, layout: EngineLayout) -> int:
    """Bytes of keys and values of ``rows`` rows of the longest length."""
    return rows * row_tokens * 2 * size.layers * size.kv_heads * size.head_dim * layout.computed


def bound_activations(
    size: ModelSize, passes: Passes, layout: EngineLayout, eager: bool, logits: int = LOGIT_COPIES
) -> int:
    """A rough upper bound of what the largest pass keeps for its backward, in bytes.

    A layer keeps four tensors of the feed-forward's width, four of the queries, keys and values, eight of
    the hidden size and four more of it in float32 (the norms), and with ``eager`` attention the matrix of
    every head three times. With gradient checkpointing a layer keeps its input, and one of them all.
    Logits count ``logits`` times in float32, for response tokens; fused ones are a few blocks. Ranks that
    share a sequence have a part of all this each. With activation offload only the layer at work counts.
    """
    tokens = -(-passes.rows * passes.row_tokens // layout.sequence_parts)
    projections = (size.heads + 2 * size.kv_heads) * size.head_dim
    numbers = 4 * size.intermediate + 4 * projections + 8 * size.hidden
    layer = tokens * (numbers * layout.computed + 4 * 4 * size.hidden)
    if eager:
        layer += size.heads * passes.row_tokens * tokens * (4 + 2 * layout.computed)
    inputs = tokens * size.hidden * layout.computed
    if layout.activation_offload:
        layers = layer
    else:
        layers = size.layers * inputs + layer if layout.checkpointing else size.layers * layer
    head = logits * 4 * -(-passes.rows * passes.response_tokens // layout.sequence_parts) * size.vocabulary
    return layers + (min(head, FUSED_LOGIT_BYTES) if layout.fused_logits else head)


def total(items: list[MemoryItem], phase: Phase) -> int:
    """The most that a rank's device holds in a phase, in which models take turns.

    What is offloaded is on the device while it is used: weights in passes, the optimizer's state in its
    step, when there are no activations any more.
    """
    held = sum(item.bytes for item in items if item.phase == "held" and not item.on_host)
    if phase == "held":
        return held
    if phase == "generate":
        weights = (item.bytes for item in items if item.on_host and item.name == "actor: parameters")
        return held + sum(weights) + sum(item.bytes for item in items if item.phase == "generate")
    owners = {item.name.partition(":")[0] for item in items}
    return held + max((_to_update(items, owner) for owner in owners), default=0)


def _to_update(items: list[MemoryItem], owner: str) -> int:
    mine = [item for item in items if item.name.startswith(f"{owner}:")]
    visiting = {item.name.partition(": ")[2]: item.bytes for item in mine if item.on_host}
    passes = sum(item.bytes for item in mine if item.phase == "update" and not item.on_host)
    return visiting.get("parameters", 0) + max(passes, visiting.get("optimizer state", 0))
