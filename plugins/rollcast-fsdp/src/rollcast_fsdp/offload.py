"""Offload of activations to host memory between forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ActivationOffload"]

#: Smaller tensors are not offloaded: copying them takes longer than it saves.
_LEAST_BYTES = 1 << 16


class ActivationOffload(torch.autograd.graph.saved_tensors_hooks):
    """A context that offloads tensors saved by a forward on ``device`` to host memory until the backward needs them.

    Weights are not offloaded: they stay on the device anyway, or FSDP2 gathers them again. Copies to pinned memory are
    asynchronous but run in the stream of the computation, so no value is read before it has arrived.

    Args:
        device: device whose tensors are offloaded.
        least_bytes: size in bytes of the smallest tensor to offload.
    """

    def __init__(self, device: torch.device, least_bytes: int = _LEAST_BYTES) -> None:
        self._device = device
        self._least_bytes = least_bytes
        self.bytes_offloaded = 0
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        if not self._goes(tensor):
            return tensor
        self.bytes_offloaded += tensor.nbytes
        pinned = tensor.device.type == "cuda"
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        host.copy_(tensor, non_blocking=pinned)
        return tensor.device, host

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, tuple):
            device, host = saved
            tensor: Tensor = host.to(device, non_blocking=True)
            return tensor
        unmoved: Tensor = saved
        return unmoved

    def _goes(self, tensor: Tensor) -> bool:
        whole = tensor if tensor._base is None else tensor._base
        return (
            tensor.device.type == self._device.type
            and tensor.nbytes >= self._least_bytes
            and not isinstance(whole, nn.Parameter)
        )
