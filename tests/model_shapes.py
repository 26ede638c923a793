"""The ``config.json`` of models of 0.5 to 70 billion parameters, by size."""

from __future__ import annotations

from typing import Any

__all__ = ["SHAPES"]


def _qwen2(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int, tied: bool) -> Any:
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "max_position_embeddings": 32768,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }


#: Qwen2.5, and with 70B the sizes of Llama 3.
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": _qwen2(896, 4864, 24, 14, 2, 151936, True),
    "7B": _qwen2(3584, 18944, 28, 28, 4, 152064, False),
    "32B": _qwen2(5120, 27648, 64, 40, 8, 152064, False),
    "70B": _qwen2(8192, 28672, 80, 64, 8, 128256, False),
}
