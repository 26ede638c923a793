"""Keeping a stage's weights and gradients off the accelerator between the phases of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rollcast.contracts.device import empty_cache
from rollcast_engine.transfer import CopyStream, HostRoom

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["StageMemory"]


class StageMemory:
    """The device memory of a stage's weights and gradients.

    Only storages are freed and allocated again: tensors and their views stay the same objects on the same device.
    megatron-core's buffers have parameters as views, and a parameter whose data changes its device loses the hooks that
    collect its gradient.

    Attributes:
        has_weights: True if the weights are on the device.

    Args:
        runners: chunks of the stage, or megatron-core's ``DistributedDataParallel`` around them.
        copies: stream of the copies.
    """

    def __init__(self, runners: Sequence[nn.Module], copies: CopyStream) -> None:
        self._runners = runners
        self._copies = copies
        self._hosts: list[Tensor] = []
        self.has_weights = True

    def free_weights(self) -> None:
        """Move the weights to host memory; on return their memory on the device is free."""
        if not self.has_weights:
            return
        weights = list(self._weights())
        if not self._hosts:
            room = HostRoom(self._copies)
            self._hosts = [room.take(weight.shape, weight.dtype) for weight in weights]
        self._copies.wait_for_compute()
        with self._copies.enter():
            for host, weight in zip(self._hosts, weights, strict=True):
                self._copies.copy(host, weight)
        self._copies.wait(self._copies.mark())
        for weight in weights:
            weight.untyped_storage().resize_(0)
        self.has_weights = False
        empty_cache()

    def load_weights(self) -> None:
        """Move the weights back to the device; what the computation queues from now on finds them there."""
        if self.has_weights:
            return
        weights = list(self._weights())
        for weight in weights:
            weight.untyped_storage().resize_(weight.numel() * weight.element_size())
        # The computation's stream may still use memory that it gave back and that the weights now have.
        self._copies.wait_for_compute()
        with self._copies.enter():
            for host, weight in zip(self._hosts, weights, strict=True):
                self._copies.copy(weight, host)
        self._copies.make_compute_wait(self._copies.mark())
        self.has_weights = True

    def free_gradients(self) -> None:
        """Drop the gradients and free megatron-core's buffers of them."""
        for buffer in self._buffers():
            buffer.grad_data.untyped_storage().resize_(0)
        empty_cache()

    def zero_gradients(self) -> None:
        """Set the gradients to zero, in new memory if theirs was freed."""
        for buffer in self._buffers():
            data = buffer.grad_data
            if not data.untyped_storage().nbytes():
                data.untyped_storage().resize_(data.numel() * data.element_size())
        for runner in self._wrappers():
            runner.zero_grad_buffer()

    def _wrappers(self) -> list[Any]:
        return [runner for runner in self._runners if hasattr(runner, "ddp_config")]

    def _buffers(self) -> Iterator[Any]:
        for runner in self._wrappers():
            yield from (*runner.buffers, *runner.expert_parallel_buffers)

    def _weights(self) -> Iterator[Tensor]:
        """Yield tensors that have all weights, in as many storages."""
        in_buffers = set()
        for buffer in self._buffers():
            if buffer.param_data is not None:
                in_buffers |= {id(parameter) for parameter in buffer.params}
                yield buffer.param_data
        seen = set()
        for runner in self._runners:
            for parameter in runner.parameters():
                if id(parameter) not in in_buffers and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter.data
