"""Memory of a device that processes share by handles, and groups of NCCL that they join outside the process group."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from rollcast_dryrun.mode import DryRunMode

__all__ = ["sharing_replacements"]


def sharing_replacements(mode: DryRunMode) -> Iterator[tuple[Any, str, Any]]:
    """Yield replacements of handles to memory, and of groups of NCCL.

    Args:
        mode: mode that records what the processes do.
    """
    rebuild = reductions.rebuild_cuda_tensor

    @functools.wraps(rebuild)
    def open_tensor(*values: Any) -> torch.Tensor:
        size, stride, offset, dtype, handle, nbytes = (values[place] for place in (1, 2, 3, 5, 7, 8))
        flat = mode.make_alias(int(handle), nbytes // dtype.itemsize, dtype)
        return flat.as_strided(size, stride, offset)

    def describe_tensor(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        handle = str(mode.storages.send_handle(tensor)).encode()
        storage = torch.storage.TypedStorage
        place = (tensor.size(), tensor.stride(), tensor.storage_offset())
        memory = (tensor.untyped_storage().nbytes(), 0, tensor.requires_grad)
        counter_and_event = (b"", 0, b"", True)
        return open_tensor, (type(tensor), *place, storage, tensor.dtype, 0, handle, *memory, *counter_and_event)

    class Group(_NcclGroup):
        def __init__(self, _: Any, rank: int, size: int, __: Any) -> None:
            super().__init__(mode, rank, size)

    yield reductions, "rebuild_cuda_tensor", open_tensor
    yield reductions, "reduce_tensor", describe_tensor
    yield torch.cuda.nccl, "version", lambda: (2, 27, 7)
    yield dist, "ProcessGroupNCCL", Group


class _NcclOptions:
    """Stands for ``ProcessGroupNCCL.Options``."""


class _Work:
    """A broadcast, which orders the streams that take part."""

    def __init__(self, mode: DryRunMode, done: Any) -> None:
        self._mode = mode
        self._done = done

    def is_completed(self) -> bool:
        self._mode.streams.wait_on_host(self._done.clock)
        return True

    def wait(self) -> bool:
        self._mode.streams.current.wait_event(self._done)
        return True


class _NcclGroup:
    """Stands for ``ProcessGroupNCCL``: each member's broadcast runs on a stream of its own after the current one."""

    Options = _NcclOptions

    def __init__(self, mode: DryRunMode, rank: int, size: int) -> None:
        self._mode = mode
        self._rank = rank
        self._size = size
        self._stream: Any = None

    def _set_default_timeout(self, _: Any) -> None:
        pass  # nothing takes time

    def broadcast(self, tensors: Sequence[torch.Tensor], options: Any) -> _Work:
        (tensor,) = tensors
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._mode.note_broadcast(tensor, self._size, writes=self._rank != options.rootRank)
        return _Work(self._mode, self._stream.record_event())

    def abort(self) -> None:
        self._stream = None
