"""Offload of activations to host memory between forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast_engine.transfer import CopyStream

__all__ = ["ActivationOffload"]

#: Smaller tensors are not offloaded: copying them takes longer than it saves.
_LEAST_BYTES = 1 << 16
#: Bytes that the backward pass fetches ahead.
_AHEAD_BYTES = 256 << 20


@dataclass
class _Saved:
    """An activation in host memory, and on the device again once it is fetched."""

    host: Tensor
    index: int
    arrived: Tensor | None = None
    mark: Any = None


class ActivationOffload(torch.autograd.graph.saved_tensors_hooks):
    """A context that offloads tensors saved by a forward to host memory until the backward needs them.

    Both ways go over the copy stream. The forward waits for no copy. The backward needs the tensors last in, first out,
    so each one that it asks for also fetches those that it will ask for next. Weights are not offloaded: they stay on
    the device anyway, or FSDP2 gathers them again.

    Args:
        copies: copy stream of the device whose tensors are offloaded.
        least_bytes: size in bytes of the smallest tensor to offload.
        ahead_bytes: bytes to fetch ahead.
    """

    def __init__(self, copies: CopyStream, least_bytes: int = _LEAST_BYTES, ahead_bytes: int = _AHEAD_BYTES) -> None:
        self._copies = copies
        self._least_bytes = least_bytes
        self._ahead_bytes = ahead_bytes
        self._saved: list[_Saved | None] = []
        self.bytes_offloaded = 0
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        if not self._goes(tensor):
            return tensor
        self.bytes_offloaded += tensor.nbytes
        saved = _Saved(self._copies.host_buffer(tensor.shape, tensor.dtype), len(self._saved))
        self._copies.wait_for_compute()
        with self._copies.enter():
            self._copies.copy(saved.host, tensor)
        # The forward may drop the tensor at once; its memory is reused only after the copy.
        self._copies.hold(tensor)
        self._saved.append(saved)
        return saved

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Saved):
            unmoved: Tensor = saved
            return unmoved
        self._fetch(saved)
        ahead = 0
        for following in reversed(self._saved[: saved.index]):
            if following is None:
                continue
            ahead += following.host.nbytes
            if ahead > self._ahead_bytes:
                break
            self._fetch(following)
        tensor = saved.arrived
        if tensor is None:
            raise RuntimeError("an offloaded activation was not fetched")
        self._copies.make_compute_wait(saved.mark, [tensor])
        # Autograd holds on to `saved`, and a graph that is retained may ask for it again.
        saved.arrived, saved.mark = None, None
        self._saved[saved.index] = None
        return tensor

    def _fetch(self, saved: _Saved) -> None:
        if saved.arrived is not None:
            return
        with self._copies.enter():
            saved.arrived = self._copies.device_buffer(saved.host.shape, saved.host.dtype)
            self._copies.copy(saved.arrived, saved.host)
        saved.mark = self._copies.mark()

    def _goes(self, tensor: Tensor) -> bool:
        whole = tensor if tensor._base is None else tensor._base
        return (
            tensor.device.type == self._copies.device.type
            and tensor.nbytes >= self._least_bytes
            and not isinstance(whole, nn.Parameter)
        )
