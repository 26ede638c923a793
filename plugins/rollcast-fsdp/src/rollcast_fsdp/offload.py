"""What a forward keeps for its backward, in host memory meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ActivationOffload"]

#: Smaller tensors stay where they are: a copy of them takes longer than it saves.
_LEAST_BYTES = 1 << 16


class ActivationOffload(torch.autograd.graph.saved_tensors_hooks):
    """A context in which tensors that a forward saves on ``device`` go to host memory until they are needed.

    Weights stay: they are on the device anyway, or FSDP2 gathers them again. Copies to pinned memory are
    asynchronous; they are in the stream of the computation, so that no value is read before it is there.

    Args:
        device: tensors on others stay as well.
        least_bytes: size of the smallest that goes.
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
