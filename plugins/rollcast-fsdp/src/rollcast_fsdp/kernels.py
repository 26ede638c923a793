"""Faster kernels for the model's layers: torch.compile, and Liger's Triton kernels."""

from __future__ import annotations

import importlib.util
import shutil
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from rollcast.errors import ConfigError
from rollcast_engine.hf import transformer
from rollcast_engine.keys import EngineKeyError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

__all__ = ["apply_liger", "compile_layers", "without_compile"]


def compile_layers(layers: Iterable[nn.Module], device: torch.device) -> None:
    """Set up torch to compile each layer at its first call, for sequences of any length.

    Raises:
        EngineKeyError: the compiler that torch needs on this device is missing; the message names it.
    """
    if device.type == "cpu":
        if not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
            raise EngineKeyError(
                "use_torch_compile",
                "is true, but torch.compile on a CPU needs a C++ compiler, and there is none (g++ or clang++); "
                "install one or set the key to false",
            )
    elif importlib.util.find_spec("triton") is None:
        raise EngineKeyError(
            "use_torch_compile",
            f"is true, but torch.compile on {device.type} needs Triton, which is not installed; "
            "pip install triton or set the key to false",
        )
    for layer in layers:
        layer.compile(dynamic=True)


def without_compile() -> AbstractContextManager[Any]:
    """Run compiled layers uncompiled during the block: in generation the length grows with each call."""
    stance: Any = torch.compiler.set_stance
    context: AbstractContextManager[Any] = stance("force_eager")
    return context


def apply_liger(module: nn.Module, device: torch.device) -> None:
    """Replace the model's norms, rotary embedding and feed-forward by Liger's.

    Liger's loss is not used: the engine computes log-probs itself.

    Raises:
        ConfigError: there is no CUDA device, Liger is not installed, or it has no kernels for the model.
    """
    if device.type != "cuda":
        raise ConfigError(f"model.use_liger is true, but Liger's kernels need a CUDA device, and this is {device.type}")
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance  # type: ignore[import-not-found]
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN  # type: ignore[import-not-found]
    except ImportError as error:
        raise ConfigError(
            f"model.use_liger is true, but Liger cannot be imported ({error}); pip install 'rollcast-fsdp[liger]'"
        ) from error
    body = transformer(module)
    kind = body.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        known = ", ".join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))
        raise ConfigError(f"model.use_liger is true, but Liger has no kernels for {kind}; it has them for {known}")
    _apply_liger_kernel_to_instance(model=body, cross_entropy=False, fused_linear_cross_entropy=False)
