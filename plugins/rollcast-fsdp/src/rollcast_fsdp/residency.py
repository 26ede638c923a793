"""Moving gradients and optimizer state between the device and host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["move_gradients", "move_optimizer_state"]


def move_gradients(module: nn.Module) -> None:
    """Move each gradient to its parameter's device."""
    for parameter in module.parameters():
        if parameter.grad is not None and parameter.grad.device != parameter.device:
            parameter.grad = parameter.grad.to(parameter.device)


def move_optimizer_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move all tensors of the state to ``device``."""
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = value.to(device)
