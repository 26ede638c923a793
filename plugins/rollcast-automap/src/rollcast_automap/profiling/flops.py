"""Floating-point operations of decoder-only transformers, from their ``config.json``.

Operations are counted as in "PaLM: Scaling Language Modeling with Pathways" (appendix B): the products with weights
and the two products of attention, with one addition and one multiplication each. Attention counts the whole square of
positions, although a causal kernel skips half of it, and sliding windows count as the whole row. A backward pass counts
as two forward passes. Recomputation, norms, activations, the embedding and the optimizer's step are not counted.
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
    """Multiplications of a model per token and per pair of positions.

    Attributes:
        body: weights that a token is multiplied with in all layers; in a mixture, only the experts of the token.
        head: weights of the vocabulary head or value head.
        pair: multiplications per pair of positions in all layers: query with key, and attention weight with value.
    """

    body: int
    head: int
    pair: int

    def count(self, lengths: Iterable[int], head_tokens: int | None = None, kind: Pass = "forward") -> float:
        """Return the operations of a pass over rows.

        Args:
            lengths: tokens of each row, without padding.
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
        """Return the operations of one further token for each of ``rows`` rows of ``length`` tokens."""
        return 2.0 * rows * (self.body + self.head + self.pair * length)

    def as_value_model(self, hidden: int) -> ModelFlops:
        """Return the same model with a value head, which has one output, instead of the vocabulary head."""
        return replace(self, head=hidden)


def _int(config: Config, key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        if default is None:
            raise KeyError(key)
        return default
    return int(value)


def _router(config: Config) -> int:
    # Published folders and newer transformers releases use different keys for the number of experts.
    key = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    return _int(config, "hidden_size") * _int(config, key)


def _gated(config: Config, width: int) -> int:
    """Return the weights of a gated feed-forward part: gate, up and down projection."""
    return 3 * _int(config, "hidden_size") * width


def _dense(config: Config) -> int:
    return _int(config, "num_hidden_layers") * _gated(config, _int(config, "intermediate_size"))


def _sparse_layers(config: Config) -> int:
    """Return the number of layers with experts, for a config that lists the dense layers."""
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


#: ``model_type`` → function that counts the feed-forward weights that a token is multiplied with.
ARCHITECTURES: Mapping[str, Callable[[Config], int]] = {
    **dict.fromkeys(("gemma", "llama", "mistral", "qwen2", "qwen3", "smollm3"), _dense),
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
}


def count_model_flops(config: Config) -> ModelFlops:
    """Count the operations of the model in a ``config.json``; in a multimodal model, those of its ``text_config``.

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
    """Count the operations of the model in a Hugging Face folder; weight files are not needed.

    A model whose architecture is not in :data:`ARCHITECTURES` is built without memory for its weights, and its linear
    layers are counted, which takes some seconds.

    Args:
        folder: folder with a ``config.json``.
        value_model: True to count a value head instead of the vocabulary head.
        trust_remote_code: allow the folder's own Python code.

    Raises:
        ConfigError: the folder has no readable config, or its model cannot be counted.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    try:
        flops = count_model_flops(config)
    except KeyError:
        flops = _count_modules(folder, trust_remote_code)
    if not value_model:
        return flops
    text: Config = config.get("text_config") or config
    return flops.as_value_model(_int(text, "hidden_size", 1))


def _count_modules(folder: Path, trust_remote_code: bool) -> ModelFlops:
    """Count the operations from the linear layers of the model, for dense models of any architecture."""
    import torch
    import transformers
    from transformers.pytorch_utils import Conv1D

    auto: Any = transformers.AutoModelForCausalLM
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        if getattr(config, "vision_config", None) is not None:
            raise ConfigError(
                f"the operations of the model in {folder} cannot be counted: model_type={config.model_type} has a "
                "vision tower, whose work depends on the images"
            )
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
