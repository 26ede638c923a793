"""Buckets of weights in one flat buffer, and buffers that several processes of a node can map."""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast.contracts.weights import WeightBucket
from rollcast.errors import WeightSyncError
from rollcast_serving.casting import CastRoom, Outgoing

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "BucketMemory",
    "MappedMemory",
    "ServedBucket",
    "SharedBucket",
    "fill",
    "lay_out",
    "map_memory",
    "read_bucket",
]

_ALIGNMENT = 64
#: Seconds without a byte after which the transfer of a bucket to another node fails.
_FETCH_S = 60.0


def lay_out(bucket: Sequence[Outgoing]) -> tuple[list[dict[str, Any]], int]:
    """Return a JSON-like entry without checksum for each tensor, and the size of the buffer in bytes (at least 1)."""
    entries: list[dict[str, Any]] = []
    offset = 0
    for weight in bucket:
        dtype, shape = str(weight.dtype).removeprefix("torch."), list(weight.tensor.shape)
        entries.append({"name": weight.name, "dtype": dtype, "shape": shape, "offset": offset})
        offset += -(-weight.size // _ALIGNMENT) * _ALIGNMENT
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

    far = room.cast([item for item in bucket if item.tensor.device != flat.device])
    named: list[tuple[str, Tensor]] = []
    for weight, entry in zip(bucket, entries, strict=True):
        source = weight.tensor if weight.tensor.device == flat.device else next(far)[1]
        place = view_tensor(flat, entry)
        entry["checksum"] = copy_with_checksum(place, source)
        named.append((weight.name, place))
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


def _bytes_of(flat: Tensor) -> memoryview:
    # The stubs of numpy do not know that an array is a buffer before Python 3.12.
    array: Any = flat.numpy()
    return memoryview(array)


@dataclass(frozen=True)
class ServedBucket:
    """A bucket that processes of other nodes fetch: small and picklable. Iteration yields the bucket.

    Attributes:
        address: host and port of the sender.
        token: secret that a reader must send.
        size: bytes of the bucket.
        entries: entry of each tensor.
    """

    address: tuple[str, int]
    token: str
    size: int
    entries: Sequence[Mapping[str, Any]]

    def __iter__(self) -> Iterator[WeightBucket]:
        import torch

        flat = torch.empty(self.size, dtype=torch.uint8)
        view, filled = _bytes_of(flat), 0
        with socket.create_connection(self.address, _FETCH_S) as connection:
            connection.sendall(self.token.encode())
            while filled < self.size:
                count = connection.recv_into(view[filled:])
                if not count:
                    raise WeightSyncError(f"the replica's first node closed the connection to {self.address[0]}")
                filled += count
        yield read_bucket(flat, self.entries)


class BucketMemory:
    """The sender's memory, reused for each bucket.

    Args:
        host: address on which readers of other nodes fetch buckets; None if all readers are on this node.
    """

    def __init__(self, host: str | None = None) -> None:
        self._memory = MappedMemory()
        self._token = secrets.token_hex(16)
        self._held = memoryview(b"")
        self._listener = None if host is None else socket.create_server((host, 0))
        if self._listener is not None:
            threading.Thread(target=self._accept, name="rollcast-buckets", daemon=True).start()

    def put(self, bucket: Sequence[tuple[str, Tensor]]) -> SharedBucket | ServedBucket:
        """Copy a bucket into the memory, overwriting the previous one, which all readers must have read."""
        expected = bucket.expected if isinstance(bucket, WeightBucket) else {}
        entries, size = lay_out([Outgoing(name, tensor, tensor.dtype) for name, tensor in bucket])
        flat = self._memory.reserve(size)
        for (name, tensor), entry in zip(bucket, entries, strict=True):
            entry["checksum"] = expected.get(name)
            view_tensor(flat, entry).copy_(tensor.detach())
        if self._listener is None:
            return SharedBucket(self._memory.path, entries)
        self._held = _bytes_of(flat[:size])
        host, port = self._listener.getsockname()[:2]
        return ServedBucket((host, port), self._token, size, entries)

    def close(self) -> None:
        """Release the memory."""
        if self._listener is not None:
            self._listener.close()
        self._held = memoryview(b"")
        self._memory.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while self._listener is not None:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._send, args=(connection,), daemon=True).start()

    def _send(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):  # the reader reports what it misses
            connection.settimeout(_FETCH_S)
            if secrets.compare_digest(connection.recv(len(self._token)).decode(errors="replace"), self._token):
                connection.sendall(self._held)
