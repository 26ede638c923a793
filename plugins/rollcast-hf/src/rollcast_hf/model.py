"""The rollout's own copy of a model, used without an engine."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from rollcast.contracts.device import disable_tf32, local_device
from rollcast.contracts.weights import keep_float32
from rollcast.errors import CheckpointError
from rollcast_data.vision.model_inputs import auto_class_name
from rollcast_serving.model_weights import read_model_config

__all__ = ["build_model", "load_model", "read_dtype"]


def read_dtype(path: str) -> torch.dtype:
    """Return the dtype in which a folder's model is held: its config's, else float32.

    Raises:
        CheckpointError: there is no readable ``config.json``.
    """
    try:
        # The general class reads the dtype of every model, also of one whose own class is code of its folder.
        dtype = transformers.PretrainedConfig.from_pretrained(path).dtype
    except (OSError, ValueError) as error:
        raise CheckpointError(f"no model config could be read from {path}: {error}") from error
    torch_dtype: torch.dtype | None = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return torch_dtype or torch.float32


def build_model(path: str, trust_remote_code: bool = False) -> nn.Module:
    """Return the folder's architecture in eval mode, with weights that are still meaningless.

    Raises:
        CheckpointError: there is no readable ``config.json``.
    """
    config = read_model_config(path, trust_remote_code)
    with torch.random.fork_rng(devices=[]):  # initial weights must not consume random numbers of the process
        model: nn.Module = _auto_class(config).from_config(
            config, dtype=read_dtype(path), trust_remote_code=trust_remote_code
        )
    keep_float32(model)
    return _on_device(model)


def load_model(path: str, trust_remote_code: bool = False) -> nn.Module:
    """Return the folder's model in eval mode, in the dtype of :func:`read_dtype`.

    Raises:
        CheckpointError: config or weights are missing or unreadable.
    """
    try:
        config = read_model_config(path, trust_remote_code)
        model: nn.Module = _auto_class(config).from_pretrained(
            path, dtype=read_dtype(path), trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(f"no model could be loaded from {path}: {error}") from error
    return _on_device(model)


def _on_device(model: nn.Module) -> nn.Module:
    disable_tf32()
    return model.to(local_device(0)).eval()


def _auto_class(config: Any) -> Any:
    # Any: some of transformers' methods are typed, others are not.
    return getattr(transformers, auto_class_name(config))
