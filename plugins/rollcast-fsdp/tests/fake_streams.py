"""A stand-in for a device's copy stream on a CPU, which records what a real one would do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rollcast_engine.transfer import CopyStream


class RecordingStream(CopyStream):
    """Copies between "host" and "device" memory, both of a CPU.

    As with a device, a copy to the host has arrived only when the host has waited for it.

    Attributes:
        events: ``copy`` with direction and bytes, ``mark``, ``compute waits`` and ``copies wait`` in order.
        default_copies: copies outside the stream.
        pinned: host buffers made.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.is_asynchronous = True
        self.events: list[tuple[str, Any]] = []
        self.default_copies = 0
        self.pinned: list[int] = []
        self._inside = False
        self._marks = 0
        #: Host buffers by address; held, so that no other memory gets their address.
        self._hosts: dict[int, Tensor] = {}
        self._in_flight: list[tuple[Tensor, Tensor]] = []

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        buffer = torch.zeros(tuple(shape), dtype=dtype)
        self.pinned.append(buffer.nbytes)
        self._hosts[buffer.untyped_storage().data_ptr()] = buffer
        return buffer

    @contextmanager
    def enter(self) -> Iterator[None]:
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def copy(self, target: Tensor, source: Tensor) -> None:
        to_host = target.untyped_storage().data_ptr() in self._hosts
        self.default_copies += not self._inside
        self.events.append(("to host" if to_host else "to device", source.nbytes))
        if to_host:
            self._in_flight.append((target, source.detach()))
            return
        self._arrive()  # copies of a stream are in order
        target.copy_(source)

    def _arrive(self) -> None:
        for target, source in self._in_flight:
            target.copy_(source)
        self._in_flight.clear()

    def wait_for_compute(self) -> None:
        self.events.append(("copies wait", None))

    def mark(self) -> Any:
        self._marks += 1
        self.events.append(("mark", self._marks))
        return self._marks

    def make_compute_wait(self, mark: Any, tensors: Sequence[Tensor] = ()) -> None:
        if mark is not None:
            self.events.append(("compute waits", mark))

    def hold(self, tensor: Tensor) -> None:
        self.events.append(("hold", tensor.nbytes))

    def wait(self, mark: Any) -> None:
        self._arrive()
        self.events.append(("host waits", mark))

    def bytes_moved(self) -> dict[str, int]:
        moved = {"to host": 0, "to device": 0}
        for name, value in self.events:
            if name in moved:
                moved[name] += value
        return moved
