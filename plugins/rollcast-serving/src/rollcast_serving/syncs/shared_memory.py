"""Weight sync ``shared_memory``: between processes of one node, through two buffers that both ends map.

The buffers are anonymous files whose descriptors travel over a Unix socket: they have no name that could be left
behind, and no mount's size limits them. While a replica loads one buffer, the other is filled.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor

from rollcast.contracts.rollout import RolloutMode
from rollcast.contracts.weights import WeightBucket
from rollcast.errors import RolloutError, WeightSyncError
from rollcast_serving.bucket_memory import MappedMemory, fill, lay_out, map_memory, read_bucket
from rollcast_serving.casting import CastRoom, Outgoing
from rollcast_serving.contracts.weight_sync import SyncSettings, WeightSyncCapabilities
from rollcast_serving.polling import wait_readable
from rollcast_serving.syncs.sending import ACCOUNT_S, BucketSync, Receivers, Transport

__all__ = ["SharableMemory", "SharedMemorySync", "SocketSender", "receive_buckets"]

_LENGTH = struct.Struct(">I")
_POLL_S = 0.05


class SharedMemorySync(BucketSync):
    """The weight sync ``shared_memory``; see the module. Its two buffers are kept between syncs at the largest
    bucket's size.
    """

    name: ClassVar[str] = "shared_memory"
    capabilities: ClassVar[WeightSyncCapabilities] = WeightSyncCapabilities(
        modes=frozenset(RolloutMode), same_node=True
    )

    _buffers: tuple[MappedMemory, MappedMemory] | None = None

    @contextmanager
    def transport(self) -> Iterator[Transport]:
        if self._buffers is None:
            self._buffers = (MappedMemory(), MappedMemory())
        with SocketSender(self._buffers, self.settings) as sender:
            yield sender

    @classmethod
    def open(cls, source: Mapping[str, Any]) -> Iterator[WeightBucket]:
        """Return the buckets in a target's process; see :meth:`BaseWeightSync.open`.

        Raises:
            WeightSyncError: during iteration, if the sender is unreachable or gone.
        """
        return receive_buckets(source, _map_message)

    def close(self) -> None:
        for buffer in self._buffers or ():
            buffer.close()
        self._buffers = None


@dataclass
class _Reader:
    """A connected reader: the number of buckets that it has taken, and the buffers that it has mapped."""

    connection: socket.socket
    target: int
    taken: int = 0
    mapped: dict[int, int] = field(default_factory=dict)


class SharableMemory(Protocol):
    """A buffer that processes of the node can open.

    Attributes:
        number: number of allocations so far; a reader opens each once.
    """

    number: int

    def reserve(self, size: int) -> Tensor:
        """Return at least ``size`` bytes, uint8; in a new allocation if the current one is too small."""
        ...

    def describe(self) -> tuple[Mapping[str, Any], Sequence[int]]:
        """Return what one more process needs to open the allocation: JSON-like entries, and file descriptors."""
        ...

    def settle(self) -> None:
        """Wait until writes are visible to other processes."""
        ...


class SocketSender(Transport):
    """Transport that listens on a socket, fills buffers, and waits until all readers have taken them.

    Args:
        buffers: buffers to fill in turn.
        settings: deadline for a reader to connect, and to take a bucket.
    """

    def __init__(self, buffers: Sequence[SharableMemory], settings: SyncSettings) -> None:
        self._buffers = buffers
        self._timeout_s = settings.timeout_s
        self._folder = Path(tempfile.mkdtemp(prefix="rollcast-weights-"))  # for this user only
        self._token = secrets.token_hex(16)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._folder / "socket"))
        self._listener.listen()
        self._listener.settimeout(_POLL_S)
        self._readers: list[_Reader] = []
        self._connected = False
        self._sent = 0
        #: Entries of the staged bucket.
        self._entries: list[dict[str, Any]] = []
        # A reader's timeout is longer than this end's for another reader that hangs.
        self.source = {"path": str(self._folder / "socket"), "token": self._token, "timeout_s": 2 * self._timeout_s}

    def __enter__(self) -> SocketSender:
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._readers:
            reader.connection.close()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def stage(self, bucket: Sequence[Outgoing], room: CastRoom, receivers: Receivers) -> WeightBucket:
        self._connect(receivers)
        self._wait_taken(self._sent - len(self._buffers) + 1, receivers)
        self._entries, size = lay_out(bucket)
        return fill(self._buffers[self._sent % len(self._buffers)].reserve(size), self._entries, bucket, room)

    def send(self, bucket: WeightBucket, receivers: Receivers) -> None:
        buffer, entries = self._buffers[self._sent % len(self._buffers)], self._entries
        self._sent += 1
        which = (self._sent - 1) % len(self._buffers)
        buffer.settle()
        for reader in self._living(receivers):
            described, fds = ({}, []) if reader.mapped.get(which) == buffer.number else buffer.describe()
            reader.mapped[which] = buffer.number
            self._tell(reader, {"buffer": which, "tensors": entries, **described}, receivers, fds)

    def finish(self, receivers: Receivers) -> None:
        self._connect(receivers)
        for reader in self._living(receivers):
            self._tell(reader, {"end": True}, receivers)
        self._wait_taken(self._sent + 1, receivers)

    def _connect(self, receivers: Receivers) -> None:
        """Wait until all processes of every living target have connected."""
        if self._connected:
            return
        wanted = dict.fromkeys(range(len(receivers)), 1)
        seen = dict.fromkeys(range(len(receivers)), 0)
        deadline = time.monotonic() + self._timeout_s
        while absent := [
            target for target, count in wanted.items() if seen[target] < count and target not in receivers.lost
        ]:
            receivers.check()
            if time.monotonic() > deadline:
                for target in absent:
                    receivers.lose(target, _late(f"did not fetch its weights within {self._timeout_s:g} s"))
                break
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            connection.settimeout(self._timeout_s)
            hello, _ = _receive_message(connection)
            if hello.get("token") != self._token or hello.get("target") not in wanted:
                connection.close()
                continue
            wanted[hello["target"]] = int(hello["readers"])
            seen[hello["target"]] += 1
            self._readers.append(_Reader(connection, hello["target"]))
        self._connected = True

    def _living(self, receivers: Receivers) -> list[_Reader]:
        return [reader for reader in self._readers if reader.target not in receivers.lost]

    def _tell(self, reader: _Reader, message: Mapping[str, Any], receivers: Receivers, fds: Sequence[int] = ()) -> None:
        with _broken_means_lost(reader, receivers):
            _send(reader.connection, message, fds)

    def _wait_taken(self, count: int, receivers: Receivers) -> None:
        deadline = time.monotonic() + self._timeout_s
        for reader in self._readers:
            while reader.taken < count and reader.target not in receivers.lost:
                with _broken_means_lost(reader, receivers):
                    if wait_readable(reader.connection.fileno(), _POLL_S):
                        message, _ = _receive_message(reader.connection)
                        reader.taken = int(message["taken"])
                receivers.check()
                if time.monotonic() > deadline and reader.taken < count and reader.target not in receivers.lost:
                    receivers.lose(reader.target, _late(f"did not take a bucket within {self._timeout_s:g} s"))


def _late(problem: str) -> RolloutError:
    return RolloutError(f"a replica {problem}")


@contextmanager
def _broken_means_lost(reader: _Reader, receivers: Receivers) -> Iterator[None]:
    """Treat a broken connection as the target's death if it has died or does not report another reason.

    Raises:
        WeightSyncError: the target is alive and refused the weights.
    """
    try:
        yield
    except (OSError, EOFError) as error:
        receivers.check(ACCOUNT_S)
        if reader.target not in receivers.lost:
            receivers.lose(reader.target, RolloutError(f"a replica disconnected during a weight update: {error}"))


def _map_message(message: Mapping[str, Any], fds: Sequence[int]) -> Tensor | None:  # noqa: ARG001  # it says no more
    if not fds:
        return None
    flat = map_memory(fds[0])
    os.close(fds[0])
    return flat


def receive_buckets(
    source: Mapping[str, Any],
    open_buffer: Callable[[Mapping[str, Any], Sequence[int]], Tensor | None],
    settle: Callable[[], None] = lambda: None,
) -> Iterator[WeightBucket]:
    """Yield the buckets of a :class:`SocketSender`.

    Args:
        source: description from the sender.
        open_buffer: returns the memory that a message and its file descriptors describe; None if they describe none.
        settle: waits until the work on a bucket is finished; afterwards the sender may fill its buffer again.

    Raises:
        WeightSyncError: the sender is unreachable or gone.
    """
    buffers: dict[int, Tensor] = {}
    offset = 0
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(float(source["timeout_s"]))
        try:
            connection.connect(source["path"])
            hello = {"token": source["token"], "target": source["target"], "readers": source.get("readers", 1)}
            _send(connection, hello)
            while True:
                message, fds = _receive_message(connection)
                if "end" in message:
                    _send(connection, {"taken": offset + 1})
                    return
                if (opened := open_buffer(message, fds)) is not None:
                    buffers[message["buffer"]] = opened
                yield read_bucket(buffers[message["buffer"]], message["tensors"])
                settle()
                offset += 1
                _send(connection, {"taken": offset})
        except (OSError, EOFError) as error:
            raise WeightSyncError(f"the trainer disconnected while it sent weights: {error}") from error


def _send(connection: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    data = json.dumps(message).encode()
    socket.send_fds(connection, [_LENGTH.pack(len(data))], list(fds))
    connection.sendall(data)


def _receive_message(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, fds, _, _ = socket.recv_fds(connection, _LENGTH.size, 1)
    if not head:
        raise EOFError("the connection was closed")
    head += _receive_exactly(connection, _LENGTH.size - len(head))
    return json.loads(_receive_exactly(connection, _LENGTH.unpack(head)[0])), fds


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise EOFError("the connection was closed")
        parts += part
    return bytes(parts)
