"""Memory of tensors: the streams that wrote and read it, and its end."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollcast_dryrun.record import Place, find_place

if TYPE_CHECKING:
    import torch

    from rollcast_dryrun.record import Recorder
    from rollcast_dryrun.streams import DeviceStreams, MockStream

__all__ = ["Storages"]


@dataclass
class _Storage:
    """The state of one storage.

    Attributes:
        stream: stream in whose order the memory is reused.
        block: block of the allocator; None for host memory, and for none.
        size: bytes.
        place: line that allocated it.
        host, pinned: True for host memory, and for pinned host memory.
        write: stream and number of the last write; None before the first.
        reads: number of the last read by stream.
        before: operations on what the memory held before, which the first write has to follow.
        held: streams that the memory waits for when it is freed, by ``record_stream``.
        reference: weak reference to the storage; its callback frees the block.
    """

    stream: MockStream
    block: Any
    size: int
    place: Place
    host: bool = False
    pinned: bool = False
    write: tuple[int, int] | None = None
    reads: dict[int, int] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    reference: Any = None


class Storages:
    """The storages of the device, and those of the host that take part in copies.

    Args:
        recorder: record to which faults are added.
        streams: streams of the device.
    """

    def __init__(self, recorder: Recorder, streams: DeviceStreams) -> None:
        self._recorder = recorder
        self._streams = streams
        self._known: dict[int, _Storage] = {}

    def add(self, tensor: torch.Tensor, pinned: bool = False, host: bool = False) -> None:
        """Note a tensor's storage, if it is new, as allocated on the current stream."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        stream = self._streams.current
        entry = _Storage(stream, None, storage.nbytes(), find_place(), host, pinned)
        if not host:
            self._allocate(entry)
        entry.reference = weakref.ref(storage, lambda _: self._free(key))
        self._known[key] = entry
        if not host:
            self._recorder.note_peak(self.holders)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return True if a host tensor's memory was allocated as pinned."""
        entry = self._known.get(tensor.untyped_storage()._cdata)
        return entry is not None and entry.pinned

    def hold(self, tensor: torch.Tensor, stream: MockStream) -> None:
        """Let the memory wait for ``stream`` when it is freed, as ``Tensor.record_stream`` does."""
        entry = self._known.get(tensor.untyped_storage()._cdata)
        if entry is not None:
            entry.held.add(stream.number)

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Note that a storage was resized; to 0 frees its memory."""
        entry = self._known.get(storage._cdata)
        if entry is None or entry.host or entry.size == size:
            return
        self._release(entry)
        entry.size, entry.write, entry.reads, entry.held = size, None, {}, set()
        entry.stream = self._streams.current
        self._allocate(entry)

    def use(self, tensor: torch.Tensor, writes: bool, tick: int) -> None:
        """Check and note that operation ``tick`` of the current stream reads or writes a tensor."""
        entry = self._known.get(tensor.untyped_storage()._cdata)
        if entry is None:
            return
        stream = self._streams.current
        verb = "writes" if writes else "reads"
        if entry.write is not None and not stream.follows(*entry.write):
            self._recorder.report_fault(
                "race", f"stream {stream.number} {verb} what stream {entry.write[0]} may still write"
            )
        if entry.before:
            late = [other for other, last in entry.before.items() if not stream.follows(other, last)]
            entry.before = {}
            if late:
                self._recorder.report_fault(
                    "early_free", f"memory that stream {late[0]} may still use is reused by stream {stream.number}"
                )
        if writes:
            late = [other for other, last in entry.reads.items() if not stream.follows(other, last)]
            if late:
                self._recorder.report_fault(
                    "race", f"stream {stream.number} writes what stream {late[0]} may still read"
                )
            entry.write, entry.reads = (stream.number, tick), {}
        else:
            entry.reads[stream.number] = tick

    def use_on_host(self, tensor: torch.Tensor, writes: bool) -> None:
        """Check that the host reads or writes its memory only after the copies from and to it."""
        entry = self._known.get(tensor.untyped_storage()._cdata)
        if entry is None or not entry.pinned:
            return
        done = self._streams.host
        if entry.write is not None and done.get(entry.write[0], 0) < entry.write[1]:
            self._recorder.report_fault(
                "host_race", f"the host uses memory that stream {entry.write[0]} may still write"
            )
        late = [stream for stream, tick in entry.reads.items() if done.get(stream, 0) < tick]
        if writes and late:
            self._recorder.report_fault("host_race", f"the host writes memory that stream {late[0]} may still read")

    def holders(self) -> Counter[Place]:
        """Return the bytes on the device by the line that allocated them."""
        held: Counter[Place] = Counter()
        for entry in self._known.values():
            if entry.block is not None:
                held[entry.place] += entry.size
        return held

    def _allocate(self, entry: _Storage) -> None:
        if entry.size:
            entry.block = self._recorder.allocator.allocate(entry.size, entry.stream.number)
            entry.before = dict(entry.block.uses)

    def _free(self, key: int) -> None:
        self._release(self._known.pop(key))

    def _release(self, entry: _Storage) -> None:
        if entry.block is None:
            return
        uses = {stream: tick for stream, tick in entry.reads.items() if stream not in entry.held}
        if entry.write is not None and entry.write[0] not in entry.held:
            uses[entry.write[0]] = max(entry.write[1], uses.get(entry.write[0], 0))
        self._recorder.allocator.free(entry.block, uses)
        entry.block = None
