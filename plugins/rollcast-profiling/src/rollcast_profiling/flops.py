"""Floating-point operations of decoder-only transformers, from their ``config.json`` alone.

Counted are the multiplications with weights and the two products of attention, an addition and a
multiplication each, as in "PaLM: Scaling Language Modeling with Pathways" (appendix B): attention over the
whole square of positions, though a causal kernel leaves half of it out, and no recomputation. A backward
pass is twice the forward pass. Norms, activations, the embedding and the optimizer's step are not counted.
Sliding windows are counted as if they were the whole row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rollcast.errors import ConfigError

__all__ = ["ARCHITECTURES", "ModelFlops", "count_model_flops", "read_model_flops"]

Config = Mapping[str, Any]
Pass = Literal["forward", "train"]


@dataclass(frozen=True)
class ModelFlops:
    """What one token, and one pair of positions, costs in a model.

    Attributes:
        body: weights that a token is multiplied with in all layers; of experts those that are chosen.
        head: weights of the vocabulary head, or of a value head.
        pair: numbers that a pair of positions is multiplied with in all layers: of its query and key, and
            of its weight and value.
    """

    body: int
    head: int
    pair: int

    def count(self, lengths: Iterable[int], head_tokens: int | None = None, kind: Pass = "forward") -> float:
        """Operations of a pass over rows.

        Args:
            lengths: tokens of each row, padding not counted.
            head_tokens: positions that go through the head; None for all.
            kind: ``forward``, or ``train`` for forward and backward.
        """
        rows = list(lengths)
        tokens = sum(rows)
        through_head = tokens if head_tokens is None else head_tokens
        pairs = sum(length * length for length in rows)
        forward = 2.0 * (self.body * tokens + self.head * through_head + self.pair * pairs)
        return 3.0 * forward if kind == "train" else forward

    def count_decode(self, rows: int, length: int) -> float:
        """Operations of one further token for each of ``rows`` rows of ``length`` tokens."""
        return 2.0 * rows * (self.body + self.head + self.pair * length)

    def as_value_model(self, hidden: int) -> ModelFlops:
        """The same body under a head with one output."""
        return replace(self, head=hidden)


def _int(config: Config, key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        if default is None:
            raise KeyError(key)
        return default
    return int(value)


def _router(config: Config) -> int:
    # Published folders and newer transformers write different names for the same number.
    key = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    return _int(config, "hidden_size") * _int(config, key)


def _gated(config: Config, width: int) -> int:
    """Gate, up and down."""
    return 3 * _int(config, "hidden_size") * width


def _dense(config: Config) -> int:
    return _int(config, "num_hidden_layers") * _gated(config, _int(config, "intermediate_size"))


def _sparse_layers(config: Config) -> int:
    """Layers with experts, of a config that names the others."""
    step, dense = _int(config, "decoder_sparse_step", 1), set(config.get("mlp_only_layers") or ())
    layers = range(_int(config, "num_hidden_layers"))
    return sum(1 for layer in layers if layer not in dense and (layer + 1) % step == 0)


def _qwen3_moe(config: Config) -> int:
    sparse = _sparse_layers(config)
    experts = _int(config, "num_experts_per_tok") * _gated(config, _int(config, "moe_intermediate_size"))
    others = (_int(config, "num_hidden_layers") - sparse) * _gated(config, _int(config, "intermediate_size"))
    return sparse * (_router(config) + experts) + others


def _qwen2_moe(config: Config) -> int:
    shared = _gated(config, _int(config, "shared_expert_intermediate_size")) + _int(config, "hidden_size")
    return _qwen3_moe(config) + _sparse_layers(config) * shared


def _mixtral(config: Config) -> int:
    experts = _int(config, "num_experts_per_tok") * _gated(config, _int(config, "intermediate_size"))
    return _int(config, "num_hidden_layers") * (_router(config) + experts)


#: ``model_type`` → weights of all feed-forward parts that a token is multiplied with.
ARCHITECTURES: Mapping[str, Callable[[Config], int]] = {
    **dict.fromkeys(("gemma", "llama", "mistral", "qwen2", "qwen3", "smollm3"), _dense),
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
}


def count_model_flops(config: Config) -> ModelFlops:
    """From the content of a ``config.json``; of a model with several parts its ``text_config`` counts.

    Raises:
        KeyError: the architecture is not in :data:`ARCHITECTURES`, or the config lacks a number.
    """
    text: Config = config.get("text_config") or config
    kind = str(text.get("model_type", ""))
    hidden, heads, layers = (_int(text, key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    head_dim = _int(text, "head_dim", hidden // heads)
    kv_heads = _int(text, "num_key_value_heads", heads)
    projections = hidden * head_dim * (2 * heads + 2 * kv_heads)
    return ModelFlops(
        body=layers * projections + ARCHITECTURES[kind](text),
        head=hidden * _int(text, "vocab_size"),
        pair=2 * layers * heads * head_dim,
    )


def read_model_flops(folder: Path, value_model: bool = False, trust_remote_code: bool = False) -> ModelFlops:
    """Of a Hugging Face folder; weights are not read, and need not be there.

    An architecture that is not in :data:`ARCHITECTURES` is built without memory and its linear layers are
    counted, which takes some seconds.

    Args:
        folder: with a ``config.json``.
        value_model: count a value head in place of the vocabulary's.
        trust_remote_code: allow the folder's own Python code.

    Raises:
        ConfigError: the folder has no readable config, or one of a model that cannot be counted.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    try:
        found = count_model_flops(config)
    except KeyError:
        found = _count_modules(folder, trust_remote_code)
    if not value_model:
        return found
    text: Config = config.get("text_config") or config
    return found.as_value_model(_int(text, "hidden_size", 1))


def _count_modules(folder: Path, trust_remote_code: bool) -> ModelFlops:
    """From the linear layers of the model itself, for dense models of any architecture."""
    import torch
    import transformers
    from transformers.pytorch_utils import Conv1D

    auto: Any = transformers.AutoModelForCausalLM
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            module = auto.from_config(config, trust_remote_code=trust_remote_code)
        text: Any = config.get_text_config()
        heads, layers = int(text.num_attention_heads), int(text.num_hidden_layers)
        head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    except (ValueError, KeyError, OSError, AttributeError, RuntimeError, ImportError) as error:
        raise ConfigError(f"the operations of the model in {folder} cannot be counted: {error}") from error
    if any(parameter.dim() > 2 and "expert" in name for name, parameter in module.named_parameters()):
        known = ", ".join(sorted(ARCHITECTURES))
        raise ConfigError(
            f"the operations of the model in {folder} cannot be counted: model_type={config.model_type} has experts "
            f"that are not known here; architectures: {known}, and dense ones"
        )
    output = module.get_output_embeddings()
    linear = [part for part in module.modules() if isinstance(part, torch.nn.Linear | Conv1D) and part is not output]
    return ModelFlops(
        body=sum(part.weight.numel() for part in linear),
        head=0 if output is None else output.weight.numel(),
        pair=2 * layers * heads * head_dim,
    )
