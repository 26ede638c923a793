"""Reading tensors under a mask so that nothing under a 0 reaches the result or the gradient."""

from __future__ import annotations

import torch
from torch import Tensor


def widen(tensor: Tensor) -> Tensor:
    """``tensor`` in float32; float64 stays."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def masked(name: str, tensor: Tensor, mask: Tensor) -> Tensor:
    """``tensor`` in float32 or wider, with zeros under the zeros of ``mask``.

    Selects rather than multiplies: 0 · NaN is NaN, in the value and in the gradient.

    Raises:
        ValueError: the shapes differ (they are never broadcast); calls the tensor ``name``.
    """
    if tensor.shape != mask.shape:
        raise ValueError(f"{name} is {list(tensor.shape)}, but the mask is {list(mask.shape)}")
    return torch.where(mask != 0, widen(tensor), 0.0)
