"""Folders of models of any size, whose weights are holes in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rollcast.contracts.weights import checkpoint_tensors
from rollcast_engine.safetensors_writer import SafetensorsWriter

__all__ = ["write_sparse_model"]

#: A machine with little memory maps no larger file at once.
_SHARD_BYTES = 4 << 30


def write_sparse_model(folder: Path, config: Any) -> None:
    """Write a Hugging Face folder with bfloat16 weights that are all zero and take no room.

    Args:
        folder: existing folder to write into.
        config: configuration of the model, of transformers.
    """
    import transformers

    names = getattr(config, "architectures", None) or ()
    model_class: Any = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    auto_class: Any = transformers.AutoModelForCausalLM
    config.save_pretrained(folder)
    with torch.device("meta"):
        module = auto_class.from_config(config) if model_class is None else model_class(config)
    tied = set(getattr(module, "_tied_weights_keys", None) or ()) if config.tie_word_embeddings else set()
    tensors = checkpoint_tensors(module, module.state_dict())
    layout = {name: (tensor.shape, torch.bfloat16) for name, tensor in tensors.items() if name not in tied}
    SafetensorsWriter(folder, layout, shard_bytes=_SHARD_BYTES).close()
