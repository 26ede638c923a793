"""Where the tensors of a bucket lie in one flat buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rollcast.contracts.weights import WeightBucket

__all__ = ["lay_out", "read_bucket", "view_tensor"]

_ALIGNMENT = 64


def lay_out(bucket: WeightBucket) -> tuple[list[dict[str, Any]], int]:
    """An entry for each tensor, JSON-like, and the bytes of the buffer (at least 1)."""
    entries: list[dict[str, Any]] = []
    offset = 0
    for name, tensor in bucket:
        entries.append(
            {
                "name": name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "offset": offset,
                "checksum": bucket.expected.get(name),
            }
        )
        offset += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
    return entries, max(offset, 1)


def view_tensor(flat: Tensor, entry: Mapping[str, Any]) -> Tensor:
    """An entry's tensor as a view of the buffer, uint8 ``[N]``."""
    dtype: torch.dtype = getattr(torch, entry["dtype"])
    size = torch.Size(entry["shape"]).numel() * dtype.itemsize
    return flat[entry["offset"] : entry["offset"] + size].view(dtype).view(entry["shape"])


def read_bucket(flat: Tensor, entries: Sequence[Mapping[str, Any]]) -> WeightBucket:
    """The bucket that lies in the buffer."""
    return WeightBucket(
        [(entry["name"], view_tensor(flat, entry)) for entry in entries],
        {entry["name"]: entry["checksum"] for entry in entries if entry["checksum"]},
    )
