"""A bucket of weights on its way into vLLM's processes, through shared memory."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollcast.contracts.weights import WeightBucket

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BucketMemory", "SharedBucket"]

ALIGNMENT = 64


@dataclass(frozen=True)
class SharedBucket:
    """Where a bucket's tensors lie; small, and made to be pickled.

    Attributes:
        path: of the memory, to be mapped.
        size: in bytes.
        tensors: name, dtype, shape and offset in bytes of each.
        expected: checksums that the sender gave, by name.
    """

    path: str
    size: int
    tensors: Sequence[tuple[str, str, tuple[int, ...], int]]
    expected: Mapping[str, str]

    def open(self) -> WeightBucket:
        """The tensors, views of the memory; they change when the next bucket is put into it."""
        import torch

        with open(self.path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), self.size)
        named: list[tuple[str, Tensor]] = []
        for name, dtype_name, shape, offset in self.tensors:
            dtype: torch.dtype = getattr(torch, dtype_name)
            count = math.prod(shape)
            if count:
                flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
            else:
                flat = torch.empty(0, dtype=dtype)
            named.append((name, flat.view(shape)))
        return WeightBucket(named, self.expected)


class BucketMemory:
    """The sender's side: one piece of memory without a file, used again for each bucket that fits."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._path = ""
        self._memory: mmap.mmap | None = None

    def put(self, bucket: Sequence[tuple[str, Tensor]]) -> SharedBucket:
        """Copy a bucket into the memory; what was there before is gone."""
        import torch

        places, size = [], 0
        for name, tensor in bucket:
            size = -(-size // ALIGNMENT) * ALIGNMENT
            places.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), size))
            size += tensor.numel() * tensor.element_size()
        memory = self._reserve(max(size, 1))
        for (_, tensor), (_, _, _, offset) in zip(bucket, places, strict=True):
            if tensor.numel():
                target = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
                target.copy_(tensor.detach().reshape(-1))
        expected = dict(bucket.expected) if isinstance(bucket, WeightBucket) else {}
        return SharedBucket(self._path, len(memory), places, expected)

    def close(self) -> None:
        """Give the memory back, as soon as nobody else has it."""
        if self._file is not None:
            os.close(self._file)
        self._file = self._memory = None

    def _reserve(self, size: int) -> mmap.mmap:
        if self._memory is None or len(self._memory) < size:
            self.close()
            self._file, self._path = _create_memory()
            os.ftruncate(self._file, size)
            self._memory = mmap.mmap(self._file, size)
        return self._memory


def _create_memory() -> tuple[int, str]:
    """File descriptor and path of memory that is gone with its last user, however that one ends."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("rollcast-weights")
        return file, f"/proc/{os.getpid()}/fd/{file}"
    file, path = tempfile.mkstemp(prefix="rollcast-weights-")
    return file, path
