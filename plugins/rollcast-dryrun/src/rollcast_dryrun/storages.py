"""Memory of tensors: the streams that wrote and read it, and its end."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollcast_dryrun.record import Place, find_place

if TYPE_CHECKING:
    from collections.abc import Callable
    from threading import RLock

    import torch

    from rollcast_dryrun.record import Recorder
    from rollcast_dryrun.streams import DeviceStreams, MockStream

__all__ = ["DeviceProcess", "Storages"]


@dataclass(frozen=True)
class DeviceProcess:
    """One process on the device: its record, with its memory, and its streams."""

    recorder: Recorder
    streams: DeviceStreams


@dataclass
class _Storage:
    """The state of one storage.

    Attributes:
        stream: stream in whose order the memory is reused.
        recorder: record of the process that allocated it.
        block: block of its allocator; None for host memory, and for none.
        size: bytes.
        place: line that allocated it.
        host, pinned: True for host memory, and for pinned host memory.
        write: stream and number of the last write; None before the first.
        reads: number of the last read by stream.
        before: operations on what the memory held before, which the first write has to follow.
        held: streams that the memory waits for when it is freed, by ``record_stream``.
        sent, opened: numbers of handles for other processes, and of those that are open.
        reference: weak reference to the storage; its callback frees the block.
    """

    stream: MockStream
    recorder: Recorder
    block: Any
    size: int
    place: Place
    host: bool = False
    pinned: bool = False
    write: tuple[int, int] | None = None
    reads: dict[int, int] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    sent: int = 0
    opened: int = 0
    reference: Any = None


class Storages:
    """The storages of the device, and those of the host that take part in copies.

    Args:
        process: returns the process on the device that runs now.
        lock: held by whatever changes these.
    """

    def __init__(self, process: Callable[[], DeviceProcess], lock: RLock) -> None:
        self._process = process
        self._lock = lock
        self._known: dict[int, _Storage] = {}
        #: Memory that its process has freed, and that others may still open or have open.
        self._limbo: list[_Storage] = []
        #: Storages of tensors that share another process's memory.
        self._aliases: dict[int, Any] = {}

    def add(self, tensor: torch.Tensor, pinned: bool = False, host: bool = False) -> None:
        """Note a tensor's storage, if it is new, as allocated on the current stream."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        process = self._process()
        entry = _Storage(process.streams.current, process.recorder, None, storage.nbytes(), find_place(), host, pinned)
        if not host:
            self._allocate(entry)
        entry.reference = weakref.ref(storage, lambda _: self._free(key))
        self._known[key] = entry
        if not host:
            process.recorder.note_peak(lambda: self.holders(process.recorder))

    def send_handle(self, tensor: torch.Tensor) -> int:
        """Return a number with which one other process opens the tensor's memory."""
        key: int = tensor.untyped_storage()._cdata
        self._known[key].sent += 1
        return key

    def open_handle(self, key: int, tensor: torch.Tensor) -> None:
        """Let a new tensor share the memory behind a handle.

        Raises:
            RuntimeError: the memory was freed.
        """
        entry = self._known.get(key)
        if entry is None:
            raise RuntimeError("the memory behind this handle was freed")
        entry.opened += 1
        storage = tensor.untyped_storage()
        alias = storage._cdata
        self._known[alias] = entry
        self._aliases[alias] = weakref.ref(storage, lambda _: self._close_handle(alias))

    def collect(self) -> None:
        """Free what no other process may open any more; stands for ``torch.cuda.ipc_collect``."""
        for entry in [entry for entry in self._limbo if not entry.sent]:
            self._limbo.remove(entry)
            self._release(entry)

    def _close_handle(self, alias: int) -> None:
        with self._lock:
            entry = self._known.pop(alias)
            del self._aliases[alias]
            entry.opened -= 1
            entry.sent -= 1

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
        entry.stream = self._process().streams.current
        self._allocate(entry)

    def use(self, tensor: torch.Tensor, writes: bool, tick: int) -> None:
        """Check and note that operation ``tick`` of the current stream reads or writes a tensor."""
        entry = self._known.get(tensor.untyped_storage()._cdata)
        if entry is None:
            return
        process = self._process()
        stream, report_fault = process.streams.current, process.recorder.report_fault
        verb = "writes" if writes else "reads"
        if entry.write is not None and not stream.follows(*entry.write):
            report_fault("race", f"stream {stream.number} {verb} what stream {entry.write[0]} may still write")
        if entry.before:
            late = [other for other, last in entry.before.items() if not stream.follows(other, last)]
            entry.before = {}
            if late:
                report_fault(
                    "early_free", f"memory that stream {late[0]} may still use is reused by stream {stream.number}"
                )
        if writes:
            late = [other for other, last in entry.reads.items() if not stream.follows(other, last)]
            if late:
                report_fault("race", f"stream {stream.number} writes what stream {late[0]} may still read")
            entry.write, entry.reads = (stream.number, tick), {}
        else:
            entry.reads[stream.number] = tick

    def use_on_host(self, tensor: torch.Tensor, writes: bool) -> None:
        """Check that the host reads or writes its memory only after the copies from and to it."""
        entry = self._known.get(tensor.untyped_storage()._cdata)
        if entry is None or not entry.pinned:
            return
        process = self._process()
        done, report_fault = process.streams.host, process.recorder.report_fault
        if entry.write is not None and done.get(entry.write[0], 0) < entry.write[1]:
            report_fault("host_race", f"the host uses memory that stream {entry.write[0]} may still write")
        late = [stream for stream, tick in entry.reads.items() if done.get(stream, 0) < tick]
        if writes and late:
            report_fault("host_race", f"the host writes memory that stream {late[0]} may still read")

    def holders(self, recorder: Recorder) -> Counter[Place]:
        """Return the bytes of a process on the device by the line that allocated them."""
        held: Counter[Place] = Counter()
        for key, entry in self._known.items():
            if entry.block is not None and entry.recorder is recorder and key not in self._aliases:
                held[entry.place] += entry.size
        return held

    def _allocate(self, entry: _Storage) -> None:
        if entry.size:
            entry.block = entry.recorder.allocator.allocate(entry.size, entry.stream.number)
            entry.before = dict(entry.block.uses)

    def _free(self, key: int) -> None:
        with self._lock:
            entry = self._known.pop(key)
            if entry.opened:
                entry.recorder.report_fault("open_handle", "memory is freed that another process has open")
            if entry.sent:
                self._limbo.append(entry)
            else:
                self._release(entry)

    def _release(self, entry: _Storage) -> None:
        if entry.block is None:
            return
        uses = {stream: tick for stream, tick in entry.reads.items() if stream not in entry.held}
        if entry.write is not None and entry.write[0] not in entry.held:
            uses[entry.write[0]] = max(entry.write[1], uses.get(entry.write[0], 0))
        entry.recorder.allocator.free(entry.block, uses)
        entry.block = None
