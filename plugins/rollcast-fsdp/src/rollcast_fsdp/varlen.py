"""Attention kernels for packed rows, found by their signatures: flash-attn 3, flash-attn 2, and torch's varlen.

Axes: ``N`` packed tokens, ``H`` query heads, ``K`` key and value heads, ``D`` dimensions of a head.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rollcast_engine.keys import EngineKeyError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AttentionNeeds", "VarlenKernel", "find_kernel"]

_HALF = (torch.bfloat16, torch.float16)
_AMPERE, _HOPPER = (8, 0), (9, 0)


@dataclass(frozen=True)
class AttentionNeeds:
    """Features that a model's attention layers use.

    Attributes:
        dtype: dtype of queries, keys and values.
        window: True if a layer attends to a sliding window.
        dropout: True if a layer drops attention weights in training.
        head_size: ``D``.
    """

    dtype: torch.dtype
    window: bool = False
    dropout: bool = False
    head_size: int = 64


@dataclass(frozen=True)
class VarlenKernel:
    """A function that attends within each of several rows packed into one sequence.

    Attributes:
        name: name and version, for the log.
        function: function of the library.
        causal: keyword of causal attention; None if a window of ``(-1, 0)`` requests it.
        scale: keyword of the factor of the scores; None if the function always divides by ``sqrt(D)``.
        window: True if the function takes ``window_size``.
        dropout: True if the function takes ``dropout_p``.
        grouped: True if ``K`` may be smaller than ``H``.
        options: constant keyword arguments.
    """

    name: str
    function: Callable[..., Any]
    causal: str | None
    scale: str | None
    window: bool
    dropout: bool
    grouped: bool
    options: Mapping[str, Any]

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: Tensor,
        longest: int,
        scale: float | None,
        window: int | None,
        dropout: float,
    ) -> Tensor:
        """Return the causal attention ``[N, H, D]``.

        Args:
            query: ``[N, H, D]``.
            key, value: ``[N, K, D]``.
            bounds: int32 ``[rows + 1]``, start of each row, and the end.
            longest: tokens of the longest row.
            scale: factor of the scores; None for ``1 / sqrt(D)``.
            window: number of tokens that a token attends to, itself included; None for all before it.
            dropout: share of attention weights to drop; 0 unless the kernel supports it.
        """
        options = dict(self.options)
        if not self.grouped and key.size(1) != query.size(1):
            times = query.size(1) // key.size(1)
            key, value = (heads.repeat_interleave(times, dim=1) for heads in (key, value))
        if scale is not None and self.scale is None:
            query = query * (scale * math.sqrt(query.size(-1)))
        elif scale is not None and self.scale is not None:
            options[self.scale] = scale
        if self.causal is not None:
            options[self.causal] = True
        if window is not None:
            options["window_size"] = (window - 1, 0)
        elif self.causal is None:
            options["window_size"] = (-1, 0)
        if dropout:
            options["dropout_p"] = dropout
        result = self.function(query, key, value, bounds, bounds, longest, longest, **options)
        # Releases of flash-attn 3 before 2025-09 always return the log-sum-exp too.
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output

    def lacks(self, needs: AttentionNeeds) -> str:
        """Return the needed feature that the kernel does not have; empty if it has all of them."""
        if needs.window and not self.window:
            return "sliding windows"
        if needs.dropout and not self.dropout:
            return "attention dropout"
        return ""


def find_kernel(
    attention: str, device: torch.device, needs: AttentionNeeds
) -> tuple[VarlenKernel | None, tuple[str, ...]]:
    """Return the kernel to use, and why better ones are not used; no kernel means one SDPA call for each row.

    ``flash_attention_2`` and ``flash_attention_3`` require that library. ``sdpa`` takes the first that fits of
    flash-attn 3 (on Hopper and later), flash-attn 2, and torch's varlen.

    Args:
        attention: ``model.attn_implementation``.
        device: device of the model.
        needs: features that the model uses.

    Raises:
        EngineKeyError: ``attention`` requires a library that is missing or does not fit.
    """
    required = attention if attention in _REQUIRED else None
    problem = _unfit_device(device, needs)
    if problem:
        if required:
            raise _refusal(attention, problem)
        return None, (problem,)
    reasons: list[str] = []
    finders = [_REQUIRED[required]] if required else [_flash_attention_3, _flash_attention_2, _torch_varlen]
    for finder in finders:
        kernel = finder(device)
        if isinstance(kernel, str):
            reasons.append(kernel)
        elif lacked := kernel.lacks(needs):
            reasons.append(f"{kernel.name} has no {lacked}, which the model uses")
        else:
            return kernel, tuple(reasons)
    if required:
        raise _refusal(attention, "; ".join(reasons))
    return None, tuple(reasons)


def _refusal(attention: str, problem: str) -> EngineKeyError:
    return EngineKeyError(
        "use_remove_padding", f"is true, and model.attn_implementation={attention}, but {problem}; set it to sdpa"
    )


def _unfit_device(device: torch.device, needs: AttentionNeeds) -> str:
    if device.type != "cuda":
        return f"attention kernels for packed rows need a CUDA device, and this is {device.type}"
    if needs.dtype not in _HALF:
        name = str(needs.dtype).removeprefix("torch.")
        return f"attention kernels for packed rows compute in bfloat16 or float16, and the model in {name}"
    if needs.head_size > 256:
        return f"attention kernels for packed rows need heads of at most 256, and the model's have {needs.head_size}"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < _AMPERE:
        return "attention kernels for packed rows need compute capability 8.0"
    return ""


def _import(module: str) -> Any:
    """Return a module, or the reason why there is none."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        return f"{module} cannot be imported ({error})"
    except (OSError, RuntimeError) as error:  # an extension built for another torch or CUDA
        return f"{module} fails to load ({error})"


def _flash_attention_3(device: torch.device) -> VarlenKernel | str:
    module = _import("flash_attn_interface")
    if isinstance(module, str):
        return module
    if torch.cuda.get_device_capability(device) < _HOPPER:
        return "flash-attn 3 needs compute capability 9.0"
    return _flash_attn("flash-attn 3", module)


def _flash_attention_2(device: torch.device) -> VarlenKernel | str:  # noqa: ARG001  # as the others are called
    module = _import("flash_attn")
    if isinstance(module, str):
        return module
    return _flash_attn(f"flash-attn {getattr(module, '__version__', '2')}", module)


def _flash_attn(name: str, module: Any) -> VarlenKernel | str:
    function = getattr(module, "flash_attn_varlen_func", None)
    if function is None:
        return f"{name} has no flash_attn_varlen_func; version 2.0 or later is needed"
    takes = inspect.signature(function).parameters
    if not {"softmax_scale", "causal"} <= takes.keys():
        return f"the flash_attn_varlen_func of {name} has an unknown signature"
    return VarlenKernel(
        name, function, "causal", "softmax_scale", "window_size" in takes, "dropout_p" in takes, True, {}
    )


def _torch_varlen(device: torch.device) -> VarlenKernel | str:  # noqa: ARG001  # as the others are called
    module = _import("torch.nn.attention.varlen")
    if isinstance(module, str):
        return f"torch {torch.__version__} has no torch.nn.attention.varlen (added in 2.10)"
    name = f"the varlen attention of torch {torch.__version__}"
    takes = inspect.signature(module.varlen_attn).parameters
    window, causal = "window_size" in takes, "is_causal" in takes
    if not (window or causal):
        return f"{name} has an unknown signature"
    # With window_size there is no is_causal: torch 2.11 and later recognise the window (-1, 0).
    grouped = "enable_gqa" in takes
    return VarlenKernel(
        name,
        module.varlen_attn,
        "is_causal" if causal else None,
        "scale" if "scale" in takes else None,
        window,
        False,
        grouped,
        {"enable_gqa": True} if grouped else {},
    )


_REQUIRED = {"flash_attention_2": _flash_attention_2, "flash_attention_3": _flash_attention_3}
