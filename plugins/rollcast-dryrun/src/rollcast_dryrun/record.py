"""The record of a dry run: operations, collectives, host reads, copies, memory and faults, by phase."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from rollcast_dryrun.memory import CachingAllocator

__all__ = ["Collective", "Copy", "Fault", "Phase", "Place", "Recorder", "find_place"]

FaultKind = Literal["race", "early_free", "host_race", "open_handle"]
#: Factor by which memory grows until its holders are noted anew, which takes time.
_CLEARLY_MORE = 1.02
_SKIPPED = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


@dataclass(frozen=True)
class Place:
    """A line of code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def find_place() -> Place:
    """Return the line that called torch: the innermost outside torch and this package."""
    frame = sys._getframe(1)  # the inspect module reads files at each step
    while frame.f_back is not None and _short_name(frame.f_code.co_filename) is None:
        frame = frame.f_back
    file = _short_name(frame.f_code.co_filename) or frame.f_code.co_filename
    return Place(file, frame.f_lineno, frame.f_code.co_name)


@cache
def _short_name(file: str) -> str | None:
    """Return a file's name with its folder; None for one of torch or this package."""
    if file.startswith(("<", *_SKIPPED)):
        return None
    return "/".join(Path(file).parts[-2:])


@dataclass(frozen=True)
class Collective:
    """A kind of collective over one group.

    Attributes:
        kind: name of the operation, such as ``all_gather``.
        ranks: number of ranks of the group.
        nodes: True if the group spans nodes.
        stride: distance between neighbouring ranks of the group.
    """

    kind: str
    ranks: int
    nodes: bool
    stride: int = 1


@dataclass(frozen=True)
class Copy:
    """A kind of copy between host and device.

    Attributes:
        to_device: direction.
        pinned: True if the host's memory is pinned.
        blocking: True if the host waits for the copy.
        place: line of code.
    """

    to_device: bool
    pinned: bool
    blocking: bool
    place: Place


@dataclass(frozen=True)
class Fault:
    """A use of memory that the streams do not order, or that may be reused already."""

    kind: FaultKind
    text: str
    place: Place


@dataclass
class Phase:
    """Counts of one phase.

    Attributes:
        operations: operations on the device.
        kernels: launches of kernels in Triton, by name.
        collectives: numbers of calls.
        collective_bytes: bytes of a rank's largest side of these calls.
        host_reads: values of the device that the host waited for, by place.
        host_waits: waits of the host that the code asked for, as by ``torch.cuda.synchronize``, by place.
        copies, copy_bytes: copies between host and device.
        peak_allocated, peak_reserved: largest bytes on the device during the phase.
        allocated, reserved: bytes at its end.
        holders: bytes at about the peak by the line that allocated them.
        flops: floating-point operations of matrix products and attention.
        kernel_seconds: time of the operations as a roofline: the longer of their arithmetic and their memory accesses,
            at the device's peaks.
        sent: whole numbers that were sent to single ranks, in order.
    """

    operations: int = 0
    kernels: Counter[str] = field(default_factory=Counter)
    collectives: Counter[Collective] = field(default_factory=Counter)
    collective_bytes: Counter[Collective] = field(default_factory=Counter)
    host_reads: Counter[Place] = field(default_factory=Counter)
    host_waits: Counter[Place] = field(default_factory=Counter)
    copies: Counter[Copy] = field(default_factory=Counter)
    copy_bytes: Counter[Copy] = field(default_factory=Counter)
    peak_allocated: int = 0
    peak_reserved: int = 0
    allocated: int = 0
    reserved: int = 0
    holders: Counter[Place] = field(default_factory=Counter)
    flops: int = 0
    kernel_seconds: float = 0.0
    sent: list[list[int]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the phase as a value of JSON."""
        return {
            "operations": self.operations,
            "kernels": dict(self.kernels),
            "peak_allocated": self.peak_allocated,
            "peak_reserved": self.peak_reserved,
            "allocated": self.allocated,
            "reserved": self.reserved,
            "host_reads": {str(place): count for place, count in self.host_reads.items()},
            "host_waits": {str(place): count for place, count in self.host_waits.items()},
            "collectives": [
                {**asdict(kind), "calls": calls, "bytes": self.collective_bytes[kind]}
                for kind, calls in self.collectives.items()
            ],
            "copies": [
                {**asdict(kind), "place": str(kind.place), "calls": calls, "bytes": self.copy_bytes[kind]}
                for kind, calls in self.copies.items()
            ],
            "flops": self.flops,
            "kernel_seconds": self.kernel_seconds,
            "holders": {str(place): held for place, held in self.holders.most_common(8)},
        }


class Recorder:
    """The record of a dry run.

    Attributes:
        phases: phases in order; those with one name are one.
        faults: uses of memory without an order, by kind and line.
        allocator: memory of the device.
    """

    def __init__(self) -> None:
        self.phases: dict[str, Phase] = {}
        self.faults: dict[tuple[str, Place], Fault] = {}
        self.allocator = CachingAllocator()
        self._open = [("", self._named(""))]

    @property
    def current(self) -> Phase:
        """The phase that is recorded now."""
        return self._open[-1][1]

    @property
    def current_name(self) -> str:
        """Name of the phase that is recorded now; empty outside all of them."""
        return self._open[-1][0]

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Record the block as a phase."""
        phase = self._named(name)
        outer_peaks = self.allocator.peak_allocated, self.allocator.peak_reserved
        self.allocator.reset_peak()
        self._open.append((name, phase))
        try:
            yield phase
        finally:
            self._open.pop()
            memory = self.allocator
            phase.peak_allocated = max(phase.peak_allocated, memory.peak_allocated)
            phase.peak_reserved = max(phase.peak_reserved, memory.peak_reserved)
            phase.allocated, phase.reserved = memory.allocated, memory.reserved
            memory.peak_allocated = max(memory.peak_allocated, outer_peaks[0])
            memory.peak_reserved = max(memory.peak_reserved, outer_peaks[1])

    def note_peak(self, holders: Callable[[], Counter[Place]]) -> None:
        """Note who holds memory, if it is clearly more than when this was noted last."""
        if self.allocator.allocated > _CLEARLY_MORE * self.current.holders.total() + (1 << 20):
            self.current.holders = holders()

    def note_wait(self) -> None:
        """Note that the code lets the host wait."""
        self.current.host_waits[find_place()] += 1

    def report_fault(self, kind: FaultKind, text: str) -> None:
        """Add a fault at the current line, once for each line."""
        place = find_place()
        self.faults.setdefault((kind, place), Fault(kind, text, place))

    def _named(self, name: str) -> Phase:
        return self.phases.setdefault(name, Phase())
