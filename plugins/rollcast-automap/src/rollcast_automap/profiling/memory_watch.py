"""Peak memory and duration of the calls on a worker, measured in the worker's process."""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from rollcast import Worker
from rollcast.contracts.marks import add_listener, remove_listener

__all__ = [
    "MemoryWatch",
    "Peak",
    "read_peak",
    "reset_peak",
    "return_free_memory",
    "start_watch",
    "stop_watch",
    "take_peaks",
]

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESIDENT = re.compile(rb"VmHWM:\s+(\d+) kB")
#: Value for clear_refs that makes the kernel reset the peak resident size (VmHWM).
_FORGET_LARGEST = b"5"


@dataclass(frozen=True)
class Peak:
    """Peak memory in bytes, and total time.

    Attributes:
        allocated, reserved: accelerator memory used by tensors, and held by torch's allocator; 0 without accelerator.
        resident: resident memory of the process; 0 if the system does not report it.
        seconds: total duration of the calls in seconds.
    """

    allocated: int = 0
    reserved: int = 0
    resident: int = 0
    seconds: float = 0.0

    def __or__(self, other: Peak) -> Peak:
        return Peak(*map(max, astuple(self), astuple(other)))


def _cuda() -> Any:
    """Return ``torch.cuda`` if this process has initialized CUDA, else None."""
    import torch

    cuda: Any = torch.cuda
    return cuda if cuda.is_initialized() else None


def read_peak() -> Peak:
    """Return the peak since the last :func:`reset_peak`."""
    allocated = reserved = 0
    cuda = _cuda()
    if cuda is not None:
        allocated, reserved = int(cuda.max_memory_allocated()), int(cuda.max_memory_reserved())
    try:
        match = _RESIDENT.search(_STATUS.read_bytes())
    except OSError:
        match = None
    return Peak(allocated, reserved, 0 if match is None else int(match[1]) << 10)


def reset_peak() -> None:
    """Reset the peak to the current memory."""
    cuda = _cuda()
    if cuda is not None:
        cuda.reset_peak_memory_stats()
    try:
        _CLEAR.write_bytes(_FORGET_LARGEST)
    except OSError:  # without write access, peaks cover the process's whole life: still correct, but less precise
        return


def return_free_memory() -> None:
    """Return freed memory to the system if the C library can, so that it does not count in later peaks."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class MemoryWatch:
    """A listener of marked blocks named ``role.method``; blocks may be nested, or overlap in several threads.

    The peak of the process is read and reset at the start and the end of each block, and counts for every block that
    was open in between.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._peaks: dict[str, Peak] = {}
        self._open: dict[int, Peak] = {}
        self._blocks = 0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        method = name.partition(".")[2]
        if not method:
            yield
            return
        with self._lock:
            self._count_peak()
            self._blocks += 1
            block = self._blocks
            self._open[block] = Peak()
        start = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._count_peak()
                before, seconds = self._peaks.get(method, Peak()), time.perf_counter() - start
                self._peaks[method] = replace(before | self._open.pop(block), seconds=before.seconds + seconds)

    def _count_peak(self) -> None:
        peak = read_peak()
        self._open = {block: before | peak for block, before in self._open.items()}
        reset_peak()

    def take(self) -> dict[str, Peak]:
        """Return method → peak of its calls that have ended since the previous :meth:`take`."""
        with self._lock:
            peaks, self._peaks = self._peaks, {}
        return peaks


_watch: MemoryWatch | None = None


def start_watch(worker: Worker) -> None:  # noqa: ARG001  # functions run on workers get the worker
    """Start to watch the calls in this process, if not started yet."""
    global _watch  # noqa: PLW0603  # one watch per process, because memory is counted per process
    if _watch is None:
        _watch = MemoryWatch()
        add_listener(_watch)


def take_peaks(worker: Worker) -> dict[str, Peak]:  # noqa: ARG001
    """Return the peaks of :meth:`MemoryWatch.take`; empty if no watch was started."""
    return {} if _watch is None else _watch.take()


def stop_watch() -> None:
    """Stop the watch of this process, if there is one."""
    global _watch  # noqa: PLW0603
    if _watch is not None:
        remove_listener(_watch)
        _watch = None
