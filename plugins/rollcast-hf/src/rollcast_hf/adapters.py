"""LoRA adapters on the linear layers of the rollout's own module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollcast.contracts.weights import AdapterWeights

__all__ = ["AdapterHooks"]

_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


class AdapterHooks:
    """Forward hooks that add ``scaling * B @ A @ x`` to the output of each adapted layer.

    Hooks leave the base weights unchanged for the next adapter.
    """

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def attach(self, module: nn.Module, adapter: AdapterWeights) -> None:
        """Attach an adapter that fits the module, replacing the previous one."""
        self.remove()
        scaling = float(adapter.config["lora_alpha"]) / int(adapter.config["r"])
        for name, first in adapter.tensors.items():
            if name.endswith(_A):
                second = adapter.tensors[name.removesuffix(_A) + _B]
                layer = module.get_submodule(name.removeprefix(_PREFIX).removesuffix(_A))
                weight = layer.get_parameter("weight")
                a, b = first.to(weight, copy=True), second.to(weight).mul(scaling)
                self._handles.append(layer.register_forward_hook(_adding(a, b)))

    def remove(self) -> None:
        """Detach the adapter."""
        while self._handles:
            self._handles.pop().remove()


def _adding(a: Tensor, b: Tensor) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
    def add(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        low: Tensor = nn.functional.linear(inputs[0], a)
        return torch.add(output, nn.functional.linear(low, b))

    return add
