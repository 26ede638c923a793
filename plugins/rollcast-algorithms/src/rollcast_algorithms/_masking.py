"""Masking of tensors such that masked values reach neither the result nor the gradient."""

from __future__ import annotations

import torch
from torch import Tensor


def widen(tensor: Tensor) -> Tensor:
    """Convert ``tensor`` to float32; float64 stays."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def masked(name: str, tensor: Tensor, mask: Tensor) -> Tensor:
    """Return ``tensor`` in float32 or wider, zero where ``mask`` is zero.

    Selects instead of multiplying, because 0 · NaN is NaN, in the value and in the gradient.

    Raises:
        ValueError: the shapes differ (they are never broadcast); the message uses ``name`` for the tensor.
    """
    if tensor.shape != mask.shape:
        raise ValueError(f"{name} is {list(tensor.shape)}, but the mask is {list(mask.shape)}")
    return torch.where(mask != 0, widen(tensor), 0.0)
