"""Buckets of weights in one flat buffer, and buffers that several processes of a node can map."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast.contracts.weights import WeightBucket
from rollcast_serving.casting import CastRoom, Outgoing

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "BucketMemory",
    "MappedMemory",
    "SharedBucket",
    "fill",
    "lay_out",
    "map_memory",
    "read_bucket",
]

_ALIGNMENT = 64


def lay_out(bucket: Sequence[Outgoing]) -> tuple[list[dict[str, Any]], int]:
    """Return a JSON-like entry without checksum for each tensor, and the size of the buffer in bytes (at least 1)."""
    entries: list[dict[str, Any]] = []
    offset = 0
    for each in bucket:
        dtype, shape = str(each.dtype).removeprefix("torch."), list(each.tensor.shape)
        entries.append({"name": each.name, "dtype": dtype, "shape": shape, "offset": offset})
        offset += -(-each.size // _ALIGNMENT) * _ALIGNMENT
    return entries, max(offset, 1)


def fill(flat: Tensor, entries: Sequence[dict[str, Any]], bucket: Sequence[Outgoing], room: CastRoom) -> WeightBucket:
    """Copy a bucket's tensors to their places in the buffer, cast to the dtypes in which they are sent.

    A tensor on another device is cast and checksummed there before it is copied.

    Args:
        flat: buffer, uint8 ``[N]``.
        entries: entry of each tensor; its checksum is added.
        bucket: tensors to copy.
        room: memory for tensors that are cast on another device.

    Returns:
        The bucket as views of the buffer, with its checksums.
    """
    from rollcast.protocol import copy_with_checksum

    far = room.cast([each for each in bucket if each.tensor.device != flat.device])
    named: list[tuple[str, Tensor]] = []
    for each, entry in zip(bucket, entries, strict=True):
        source = each.tensor if each.tensor.device == flat.device else next(far)[1]
        place = view_tensor(flat, entry)
        entry["checksum"] = copy_with_checksum(place, source)
        named.append((each.name, place))
    return WeightBucket(named, {entry["name"]: entry["checksum"] for entry in entries})


def view_tensor(flat: Tensor, entry: Mapping[str, Any]) -> Tensor:
    """Return an entry's tensor as a view of the buffer, uint8 ``[N]``."""
    import torch

    dtype: torch.dtype = getattr(torch, entry["dtype"])
    size = torch.Size(entry["shape"]).numel() * dtype.itemsize
    return flat[entry["offset"] : entry["offset"] + size].view(dtype).view(entry["shape"])


def read_bucket(flat: Tensor, entries: Sequence[Mapping[str, Any]]) -> WeightBucket:
    """Return the bucket that the buffer contains."""
    return WeightBucket(
        [(entry["name"], view_tensor(flat, entry)) for entry in entries],
        {entry["name"]: entry["checksum"] for entry in entries if entry.get("checksum")},
    )


def map_memory(fd: int) -> Tensor:
    """Return the bytes of a file descriptor's file, uint8 ``[N]``, mapped for reading and writing."""
    import torch

    # MAP_POPULATE maps all pages at once; one page fault each takes a tenth of the time of a sync.
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    return torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size, flags), dtype=torch.uint8)


class MappedMemory:
    """Memory that other processes can map, by descriptor or path; freed when the last process has unmapped it.

    Attributes:
        fd: file descriptor; -1 before the first :meth:`reserve`.
        number: number of files so far; unlike a descriptor's number it is never reused.
    """

    def __init__(self) -> None:
        self.fd = -1
        self.number = 0
        self._path = ""
        self._flat: Tensor | None = None

    @property
    def size(self) -> int:
        """Size in bytes; 0 before the first :meth:`reserve`."""
        return 0 if self._flat is None else len(self._flat)

    @property
    def path(self) -> str:
        """Path under which another process of the same user can open the memory."""
        return self._path

    def reserve(self, size: int) -> Tensor:
        """Return at least ``size`` bytes, uint8; in a new file if the current one is too small."""
        if self._flat is None or len(self._flat) < size:
            self.close()
            if hasattr(os, "memfd_create"):
                self.fd = os.memfd_create("rollcast-weights")
                self._path = f"/proc/{os.getpid()}/fd/{self.fd}"
            else:
                self.fd, self._path = tempfile.mkstemp(prefix="rollcast-weights-")
            os.truncate(self.fd, size)
            self._flat = map_memory(self.fd)
            self.number += 1
        return self._flat

    def describe(self) -> tuple[Mapping[str, Any], Sequence[int]]:
        """Return no entries and the descriptor with which another process maps the memory."""
        return {}, [self.fd]

    def settle(self) -> None:
        """Do nothing: writes are visible to every process at once."""

    def close(self) -> None:
        """Release the memory; it is freed when no other process maps it."""
        if self.fd >= 0:
            os.close(self.fd)
            if not hasattr(os, "memfd_create"):
                Path(self._path).unlink(missing_ok=True)
        self.fd, self._path, self._flat = -1, "", None


@dataclass(frozen=True)
class SharedBucket:
    """A bucket's location in memory: small and picklable. Iteration yields the bucket."""

    path: str
    entries: Sequence[Mapping[str, Any]]

    def __iter__(self) -> Iterator[WeightBucket]:
        with Path(self.path).open("r+b") as file:
            flat = map_memory(file.fileno())
        yield read_bucket(flat, self.entries)


class BucketMemory:
    """The sender's memory, reused for each bucket."""

    def __init__(self) -> None:
        self._memory = MappedMemory()

    def put(self, bucket: Sequence[tuple[str, Tensor]]) -> SharedBucket:
        """Copy a bucket into the memory, overwriting the previous one."""
        expected = bucket.expected if isinstance(bucket, WeightBucket) else {}
        entries, size = lay_out([Outgoing(name, tensor, tensor.dtype) for name, tensor in bucket])
        flat = self._memory.reserve(size)
        for (name, tensor), entry in zip(bucket, entries, strict=True):
            entry["checksum"] = expected.get(name)
            view_tensor(flat, entry).copy_(tensor.detach())
        return SharedBucket(self._memory.path, entries)

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()
