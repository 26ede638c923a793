"""A bucket of weights on its way into SGLang's processes, through memory that both map."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollcast.contracts.weights import WeightBucket

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BucketMemory", "SharedBucket"]

_ALIGNMENT = 64

_Place = tuple[str, tuple[int, ...], int]


@dataclass(frozen=True)
class SharedBucket:
    """Where a bucket's tensors lie; small, and made to be pickled. Its only item is the bucket.

    Attributes:
        path: of the memory, as a file.
        tensors: name of each, with dtype, shape and offset in bytes.
        expected: checksums that the sender gave, by name.
    """

    path: str
    tensors: Sequence[tuple[str, _Place]]
    expected: Mapping[str, str]

    def __iter__(self) -> Iterator[WeightBucket]:
        with Path(self.path).open("r+b") as file:
            flat = _map(file.fileno())
        yield WeightBucket([(name, _view(flat, *place)) for name, place in self.tensors], self.expected)


class BucketMemory:
    """The sender's side: one nameless file in memory, used again for each bucket and gone with this process."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("rollcast-sglang-weights")
        self._flat: Tensor | None = None

    def put(self, bucket: Sequence[tuple[str, Tensor]]) -> SharedBucket:
        """Copy a bucket into the memory; what was there before is gone."""
        places: list[tuple[str, _Place]] = []
        size = 0
        for name, tensor in bucket:
            places.append((name, (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), size)))
            size += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        flat = self._reserve(max(size, 1))
        for (_, tensor), (_, place) in zip(bucket, places, strict=True):
            _view(flat, *place).copy_(tensor.detach())
        expected = dict(bucket.expected) if isinstance(bucket, WeightBucket) else {}
        return SharedBucket(f"/proc/{os.getpid()}/fd/{self._fd}", places, expected)

    def close(self) -> None:
        """Give the memory back."""
        os.close(self._fd)
        self._flat = None

    def _reserve(self, size: int) -> Tensor:
        if self._flat is None or self._flat.numel() < size:
            os.ftruncate(self._fd, size)
            self._flat = _map(self._fd)
        return self._flat


def _map(fd: int) -> Tensor:
    import torch

    return torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.uint8)


def _view(flat: Tensor, dtype: str, shape: tuple[int, ...], offset: int) -> Tensor:
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    size = math.prod(shape) * kind.itemsize
    return flat[offset : offset + size].view(kind).view(shape)
