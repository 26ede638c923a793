"""Small models of each family, with numbers in them that would show a mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
}
#: Layers 1 and 3 of four have experts.
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 2}
#: Odd, so that two ranks do not share it evenly.
VOCABULARY = 91


def family_config(family: str, tied: bool, **changes: Any) -> PretrainedConfig:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
    }
    return CONFIGS[family](**(sizes | (MIXTURE if family == "qwen3_moe" else {}) | changes))


def family_folder(path: Path, family: str, tied: bool, **changes: Any) -> Path:
    """Write a random model with biases and norms that are not just zeros and ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        module: Any = AutoModelForCausalLM.from_config(family_config(family, tied, **changes))
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                elif "embed" not in name and "gate.weight" not in name:
                    parameter.mul_(3.0)
        module.save_pretrained(path)
    return path
