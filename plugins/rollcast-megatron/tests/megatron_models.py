"""Small models of each family, with numbers in them that would show a mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

CONFIGS: dict[str, Any] = {
    "deepseek_v3": DeepseekV3Config,
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "glm4_moe": Glm4MoeConfig,
}
#: Layers 1 and 3 of four have experts.
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 2}
#: Layers 1 to 3 of four have experts, of which each token visits two, all of them in the better one of two groups.
GLM = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "attention_bias": True,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
}
#: Heads whose queries, values and rotated part differ in size, with a rotary embedding scaled as in the real model.
DEEPSEEK = {
    **{name: value for name, value in GLM.items() if name not in ("attention_bias", "use_qk_norm")},
    "partial_rotary_factor": 1.0,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "head_dim": 6,
    "v_head_dim": 8,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.8,
        "mscale_all_dim": 1.2,
    },
}
#: Fields of a family beside the sizes that all have.
FIELDS: dict[str, dict[str, Any]] = {"deepseek_v3": DEEPSEEK, "glm4_moe": GLM, "qwen3_moe": MIXTURE}
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
    return CONFIGS[family](**(sizes | FIELDS.get(family, {}) | changes))


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
            for name, buffer in module.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.add_(torch.randn_like(buffer) * 0.1)
        module.save_pretrained(path)
    return path
