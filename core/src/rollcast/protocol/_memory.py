"""Allocation of memory for large results, on huge pages where the system has them.

Most of the time of a large copy is spent on the page fault at the first access to each 4 KiB page. NumPy requests huge
pages when it allocates; torch does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

_LARGE = 4 << 20  # bytes; size from which NumPy requests huge pages
_ALIGN = 64  # bytes; the alignment of torch's own allocations


def _empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    raw = torch.from_numpy(np.empty(size + _ALIGN, np.uint8))
    start = -raw.data_ptr() % _ALIGN
    return raw[start : start + size].view(dtype).view(tuple(shape))


def empty_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate like ``torch.empty``, on huge pages if the tensor is large and on the CPU."""
    if device.type != "cpu" or math.prod(shape) * dtype.itemsize < _LARGE:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return _empty(shape, dtype)


def _suits(tensors: Sequence[torch.Tensor], size: int) -> bool:
    first = tensors[0]
    return size >= _LARGE and first.device.type == "cpu" and not any(tensor.requires_grad for tensor in tensors)


def concat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors of one dtype and row shape, like ``torch.cat``."""
    if not _suits(tensors, sum(tensor.nbytes for tensor in tensors)):
        return torch.cat(list(tensors))
    rows = sum(len(tensor) for tensor in tensors)
    return torch.cat(list(tensors), out=_empty((rows, *tensors[0].shape[1:]), tensors[0].dtype))


def index_select(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return ``tensor.index_select(0, index)``."""
    row = tensor[0].nbytes if len(tensor) else 0
    if not _suits([tensor], row * len(index)):
        return tensor.index_select(0, index)
    return torch.index_select(tensor, 0, index, out=_empty((len(index), *tensor.shape[1:]), tensor.dtype))
