"""Copies between host memory and the device: pinned, asynchronous, and on a stream of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CopyStream", "HostRoom", "move", "prefetched"]

T = TypeVar("T")
#: Alignment in bytes of the tensors in a joint copy.
_ALIGNMENT = 16
#: Bytes of the first and of the largest allocation of a :class:`HostRoom`, powers of two.
_SMALLEST_ROOM, _LARGEST_ROOM = 2 << 20, 1 << 30


class CopyStream:
    """A stream of the device for copies only, so that they overlap with the computation.

    On a CPU there is no stream, and copies are plain.

    Args:
        device: device of the computation.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        #: True if copies run beside the computation, from and to pinned memory.
        self.is_asynchronous = device.type != "cpu"
        self._module: Any = getattr(torch, device.type) if self.is_asynchronous else None
        self._stream: Any = None if self._module is None else self._module.Stream(device=device)

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return uninitialized host memory, pinned if the device can copy from it asynchronously."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=self.is_asynchronous)

    def device_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return uninitialized memory on the device."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def enter(self) -> AbstractContextManager[Any]:
        """Return a context in which the device's work, allocations included, belongs to this stream."""
        return nullcontext() if self._stream is None else self._module.stream(self._stream)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy between host and device; call it inside :meth:`enter`."""
        target.copy_(source, non_blocking=self.is_asynchronous)

    def wait_for_compute(self) -> None:
        """Make later copies wait for everything that the computation has queued so far."""
        if self._stream is not None:
            self._stream.wait_stream(self._module.current_stream(self.device))

    def mark(self) -> Any:
        """Return an event that occurs once the copies so far are done; None without a stream."""
        return None if self._stream is None else self._stream.record_event()

    def make_compute_wait(self, mark: Any, tensors: Sequence[Tensor] = ()) -> None:
        """Make later work of the computation wait for an event of :meth:`mark`.

        Args:
            mark: the event.
            tensors: tensors allocated inside :meth:`enter` that the computation will use; their memory is not given to
                a later copy before the computation is done with them.
        """
        if mark is None:
            return
        compute = self._module.current_stream(self.device)
        compute.wait_event(mark)
        for tensor in tensors:
            tensor.record_stream(compute)

    def hold(self, tensor: Tensor) -> None:
        """Keep a tensor's memory, even if the tensor is dropped, until the copies so far are done."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def wait(self, mark: Any) -> None:
        """Block the host until an event of :meth:`mark` has occurred."""
        if mark is not None:
            mark.synchronize()


class HostRoom:
    """Host memory for state that leaves the device: tensors share allocations of up to 1 GiB.

    torch rounds each pinned allocation up to a power of two, so that a buffer for each tensor takes up to twice its
    bytes.

    Args:
        copies: stream of the copies, which allocates.
    """

    def __init__(self, copies: CopyStream) -> None:
        self._copies = copies
        self._flat: Tensor | None = None
        self._used = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor; its allocation is freed with the last of its tensors."""
        size = math.prod(shape) * dtype.itemsize
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if self._flat is None or start + size > len(self._flat):
            grown = _SMALLEST_ROOM if self._flat is None else min(2 * len(self._flat), _LARGEST_ROOM)
            needed = 1 << max(size - 1, 0).bit_length()
            self._flat, start = self._copies.host_buffer((max(grown, needed),), torch.uint8), 0
        self._used = start + size
        return self._flat[start : self._used].view(dtype).view(tuple(shape))


def move(value: T, device: torch.device) -> T:
    """Return a dataclass with all its tensors on ``device``, copied in a single transfer.

    Tensors in nested dataclasses and dicts are included; a tensor that occurs twice is copied once.
    """
    copies = CopyStream(device)
    return _Sending(value, copies).receive()


def prefetched(prepare: Callable[[int], T], count: int, copies: CopyStream) -> Iterator[T]:
    """Yield ``prepare(0) .. prepare(count - 1)`` on the device.

    Each item is prepared and its copy is started before the one before it is yielded, so the copy overlaps with the
    computation on that one.

    Args:
        prepare: function that returns an item, a dataclass, in host memory.
        count: number of items.
        copies: stream of the copies.
    """
    waiting = _Sending(prepare(0), copies) if count else None
    for index in range(1, count + 1):
        following = _Sending(prepare(index), copies) if index < count else None
        yield cast("_Sending[T]", waiting).receive()
        waiting = following


class _Sending(Generic[T]):
    """An item on its way to the device."""

    def __init__(self, value: T, copies: CopyStream) -> None:
        self._value = value
        self._copies = copies
        self._mark: Any = None
        self._moved: list[Tensor] = []
        self._received: Tensor | None = None
        self._tensors: dict[int, Tensor] = {}
        if not copies.is_asynchronous:
            return
        _collect(value, self._tensors)
        tensors = list(self._tensors.values())
        ends = _places(tensors)
        # One transfer for all: a micro-batch has a dozen small tensors.
        staged = copies.host_buffer((ends[-1],), torch.uint8)
        for tensor, place in zip(tensors, ends, strict=False):
            _part(staged, place, tensor).copy_(tensor)
        with copies.enter():
            self._received = copies.device_buffer(staged.shape, torch.uint8)
            copies.copy(self._received, staged)
        self._mark = copies.mark()
        self._moved = [_part(self._received, place, tensor) for tensor, place in zip(tensors, ends, strict=False)]

    def receive(self) -> T:
        """Return the item on the device; work that is queued from now on finds it complete."""
        if self._received is None:
            return self._value
        self._copies.make_compute_wait(self._mark, [self._received])
        moved = dict(zip(self._tensors, self._moved, strict=True))
        return cast("T", _rebuild(self._value, moved))


def _places(tensors: Sequence[Tensor]) -> list[int]:
    """Return the start of each tensor in a buffer, and the buffer's size, in bytes."""
    places = [0]
    for tensor in tensors:
        places.append(-(-(places[-1] + tensor.nbytes) // _ALIGNMENT) * _ALIGNMENT)
    return places


def _part(buffer: Tensor, place: int, like: Tensor) -> Tensor:
    part = buffer[place : place + like.nbytes]
    return part.view(like.dtype).view(like.shape) if like.numel() else part.new_empty(like.shape, dtype=like.dtype)


def _collect(value: Any, tensors: dict[int, Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        tensors.setdefault(id(value), value)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, tensors)
    elif is_dataclass(value):
        for field in fields(value):
            _collect(getattr(value, field.name), tensors)


def _rebuild(value: Any, moved: dict[int, Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return moved[id(value)]
    if isinstance(value, dict):
        return {name: _rebuild(item, moved) for name, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _rebuild(getattr(value, field.name), moved) for field in fields(value)})
    return value
