"""Weight sync ``cuda_ipc``: between processes that share a GPU, through two buffers in its memory.

Only handles of the buffers travel, over the Unix socket of ``shared_memory``; the weights never leave the device. While
a replica loads one buffer, the other is filled.
"""

from __future__ import annotations

import base64
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from rollcast.contracts.rollout import RolloutMode
from rollcast.contracts.weights import WeightBucket
from rollcast.errors import WeightSyncError
from rollcast_serving.contracts.weight_sync import WeightSyncCapabilities
from rollcast_serving.syncs.sending import BucketSync, Transport
from rollcast_serving.syncs.shared_memory import SocketSender, receive_buckets

__all__ = ["CudaIpcSync", "DeviceMemory", "describe_tensor", "open_tensor"]

#: Expected parameters of torch's function that opens a handle; checked against the installed version.
_PARAMETERS = (
    *("tensor_cls", "tensor_size", "tensor_stride", "tensor_offset", "storage_cls", "dtype", "storage_device"),
    *("storage_handle", "storage_size_bytes", "storage_offset_bytes", "requires_grad", "ref_counter_handle"),
    *("ref_counter_offset", "event_handle", "event_sync_required"),
)
#: Those that travel as they are, integers and booleans, which torch tells apart.
_NUMBERS = ("tensor_offset", "storage_size_bytes", "storage_offset_bytes", "ref_counter_offset", "event_sync_required")
_HANDLES = ("storage_handle", "ref_counter_handle", "event_handle")


class CudaIpcSync(BucketSync):
    """The weight sync ``cuda_ipc``; see the module. Its two buffers exist during a sync only: between syncs their
    memory belongs to the rollout's KV cache and the training.
    """

    name: ClassVar[str] = "cuda_ipc"
    capabilities: ClassVar[WeightSyncCapabilities] = WeightSyncCapabilities(
        modes=frozenset({RolloutMode.HYBRID, RolloutMode.COLOCATED}), same_node=True, shared_devices=True
    )

    @contextmanager
    def transport(self) -> Iterator[Transport]:
        size = self.settings.bucket_bytes
        buffers = (DeviceMemory(size), DeviceMemory(size))
        try:
            with SocketSender(buffers, self.settings) as sender:
                yield sender
        finally:
            for buffer in buffers:
                buffer.close()
            collect()

    @classmethod
    def open(cls, source: Mapping[str, Any]) -> Iterator[WeightBucket]:
        """Return the buckets in a target's process; see :meth:`BaseWeightSync.open`.

        Raises:
            WeightSyncError: during iteration, if the sender is unreachable or gone, or this process lacks its device.
        """
        return receive_buckets(source, _open_message, settle)


def _open_message(message: Mapping[str, Any], fds: Sequence[int]) -> Tensor | None:  # noqa: ARG001  # none come
    return open_tensor(message["handle"]) if "handle" in message else None


class DeviceMemory:
    """Memory of the current device that other processes can open; see :class:`SharableMemory`.

    Attributes:
        number: number of allocations so far.

    Args:
        least: size in bytes of the smallest allocation, so that a few buckets of growing size take one.
    """

    def __init__(self, least: int = 0) -> None:
        self.number = 0
        self._least = least
        self._flat: Tensor | None = None
        #: Smaller allocations, which a reader may have open until the sync ends.
        self._outgrown: list[Tensor] = []

    def reserve(self, size: int) -> Tensor:
        """Return at least ``size`` bytes, uint8; in a new allocation if the current one is too small."""
        if self._flat is None or len(self._flat) < size:
            if self._flat is not None:
                self._outgrown.append(self._flat)
            self._flat = allocate(max(size, self._least))
            self.number += 1
        return self._flat

    def describe(self) -> tuple[Mapping[str, Any], Sequence[int]]:
        """Return a handle with which one more process opens the memory, and no file descriptors.

        Raises:
            RuntimeError: nothing was reserved.
        """
        if self._flat is None:
            raise RuntimeError("DeviceMemory.reserve has to be called first")
        return {"handle": describe_tensor(self._flat)}, []

    def settle(self) -> None:
        """Wait until writes are visible to other processes."""
        settle()

    def close(self) -> None:
        """Release the memory; it is freed when no other process maps it."""
        self._flat = None
        self._outgrown.clear()


def allocate(size: int) -> Tensor:
    """Return memory of the current device, uint8 ``[size]``."""
    return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device()))


def settle() -> None:
    """Wait until the current device has finished its work."""
    torch.cuda.synchronize()


def collect() -> None:
    """Take back memory that this process shared and that no other process has open any more."""
    torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def describe_tensor(flat: Tensor) -> dict[str, Any]:
    """Return a JSON-like handle with which one other process opens a tensor of this one.

    Args:
        flat: contiguous tensor, uint8 ``[N]`` on a CUDA device.

    Raises:
        WeightSyncError: the installed torch has another format of handles.
    """
    rebuild, values = reductions.reduce_tensor(flat)  # type: ignore[no-untyped-call]
    parameters = tuple(inspect.signature(rebuild).parameters)
    if parameters != _PARAMETERS or len(values) != len(_PARAMETERS):
        raise WeightSyncError(
            f"rollout.weight_sync=cuda_ipc does not support how torch {torch.__version__} shares memory of a process "
            f"({', '.join(parameters)}); choose shared_memory"
        )
    named = dict(zip(_PARAMETERS, values, strict=True))
    return {
        "device": _uuid(flat.device.index),
        "size": flat.numel(),
        **{name: named[name] for name in _NUMBERS},
        **{name: base64.b64encode(named[name]).decode() for name in _HANDLES},
    }


def open_tensor(described: Mapping[str, Any]) -> Tensor:
    """Return the tensor of another process, uint8 ``[N]``, as a view of the same memory.

    Raises:
        WeightSyncError: this process does not see the tensor's device.
    """
    seen = [_uuid(index) for index in range(torch.cuda.device_count())]
    if described["device"] not in seen:
        raise WeightSyncError(
            f"the weights are on device {described['device']}, but this process sees {', '.join(seen) or 'none'}; "
            "rollout.weight_sync=cuda_ipc needs actor and replica on one device; choose shared_memory"
        )
    values = {
        **described,
        "tensor_cls": torch.Tensor,
        "tensor_size": torch.Size([described["size"]]),
        "tensor_stride": (1,),
        "storage_cls": torch.storage.TypedStorage,
        "dtype": torch.uint8,
        # The device's index may differ from the sender's, which may see other devices.
        "storage_device": seen.index(described["device"]),
        "requires_grad": False,
        **{name: base64.b64decode(described[name]) for name in _HANDLES},
    }
    # By position, because an engine may have replaced the function by one without these names.
    flat: Tensor = reductions.rebuild_cuda_tensor(*(values[name] for name in _PARAMETERS))  # type: ignore[no-untyped-call]
    return flat


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
