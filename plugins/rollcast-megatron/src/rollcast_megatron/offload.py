"""Moving a stage's weights and gradients between the accelerator and host memory."""

from __future__ import annotations

from typing import Any

import torch

from rollcast.contracts.device import empty_cache

__all__ = ["move_stage"]


def move_stage(runner: Any, device: torch.device, *, model: bool, grad: bool) -> None:
    """Move a stage's weights or gradients; the tensor objects stay the same.

    If megatron-core keeps them in one buffer with parameters as views, the buffer's memory is freed and allocated
    again.

    Args:
        runner: a chunk of the stage, or megatron-core's ``DistributedDataParallel`` around it.
        device: target device.
        model, grad: True to move the weights, and the gradients.
    """
    buffers = [*runner.buffers, *runner.expert_parallel_buffers] if hasattr(runner, "ddp_config") else []
    in_buffers = set()
    for buffer in buffers:
        if buffer.param_data is not None:
            in_buffers |= {id(parameter) for parameter in buffer.params}
            if model:
                _move_buffer(buffer, buffer.param_data, "weights", device)
        if grad:
            _move_buffer(buffer, buffer.grad_data, "gradients", device)
    if model:
        for parameter in runner.parameters():
            if id(parameter) not in in_buffers:
                parameter.data = parameter.data.to(device)
    if device.type == "cpu":
        empty_cache()


def _move_buffer(owner: Any, data: torch.Tensor, what: str, device: torch.device) -> None:
    """Move a buffer's content to host memory and free the buffer, or restore it."""
    kept: dict[str, torch.Tensor] = owner.__dict__.setdefault("rollcast_kept", {})
    storage = data.untyped_storage()
    if device.type == "cpu":
        if what not in kept:
            kept[what] = data.to("cpu", copy=True)
            storage.resize_(0)
    elif what in kept:
        copy = kept.pop(what)
        storage.resize_(copy.numel() * copy.element_size())
        data.copy_(copy)
