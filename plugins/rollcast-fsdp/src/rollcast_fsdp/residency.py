"""Keeping weights and optimizer state in host memory between the phases of a step.

State moves once each way per phase, through pinned buffers that are reused, on the copy stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from rollcast_engine.transfer import CopyStream, HostRoom

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Residency"]

_Key = tuple[int, str]


class Residency:
    """The place of a module's weights and an optimizer's state: on the device, or in host memory.

    Buffers of the module stay on the device: they are small, and the forward needs them as they are.

    Attributes:
        module_on_device, optimizer_on_device: current place.

    Args:
        module: the model.
        optimizer: the optimizer; None for an engine that does not train.
        copies: stream of the copies; one that is not asynchronous, as on a CPU, makes all moves do nothing.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None, copies: CopyStream) -> None:
        self._module = module
        self._optimizer = optimizer
        self._copies = copies
        self._room = HostRoom(copies)
        self._hosts: dict[_Key, Tensor] = {}
        self.module_on_device = True
        self.optimizer_on_device = True

    def load(self, module: bool, optimizer: bool) -> None:
        """Start moving state to the device; what the computation queues from now on finds it there."""
        module, optimizer = module and not self.module_on_device, optimizer and not self.optimizer_on_device
        if not self._copies.is_asynchronous or not (module or optimizer):
            return
        arrived: list[Tensor] = []

        def to_device(tensor: Tensor, key: _Key) -> Tensor:  # noqa: ARG001  # as to_host is called
            target = self._copies.device_buffer(tensor.shape, tensor.dtype)
            self._copies.copy(target, tensor)
            arrived.append(target)
            return target

        with self._copies.enter():
            self._apply(to_device, module, optimizer)
        self._copies.make_compute_wait(self._copies.mark(), arrived)
        self.module_on_device |= module
        self.optimizer_on_device |= optimizer

    def offload(self, module: bool, optimizer: bool, module_changed: bool = True) -> None:
        """Move state to host memory; on return its memory on the device is free.

        Args:
            module: True for the weights.
            optimizer: True for the optimizer's state.
            module_changed: False if the weights are those of the last :meth:`load`; they are dropped without a copy.
        """
        module, optimizer = module and self.module_on_device, optimizer and self.optimizer_on_device
        if not self._copies.is_asynchronous or not (module or optimizer):
            return
        leaving: list[Tensor] = []

        def to_host(tensor: Tensor, key: _Key) -> Tensor:
            host = self._hosts.get(key)
            is_current = host is not None and key[1] == _WEIGHT and not module_changed
            if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
                host, is_current = self._room.take(tensor.shape, tensor.dtype), False
                self._hosts[key] = host
            if not is_current:
                self._copies.copy(host, tensor)
                leaving.append(tensor)
            return host

        self._copies.wait_for_compute()
        with self._copies.enter():
            for value, key in self._state(module, optimizer):
                _replaced(value, to_host, key)
        # Nothing may read the host's buffers before: FSDP2 pads an uneven shard as soon as a weight is replaced. Nor
        # may the device reuse the memory that is still being copied.
        self._copies.wait(self._copies.mark())
        leaving.clear()
        self._apply(lambda _, key: self._hosts[key], module, optimizer)
        self.module_on_device &= not module
        self.optimizer_on_device &= not optimizer

    def _state(self, module: bool, optimizer: bool) -> Iterator[tuple[Tensor, _Key]]:
        """Yield the weights, each once, and the optimizer's state, with the keys of their host buffers."""
        if module:
            yield from ((parameter, (id(parameter), _WEIGHT)) for parameter in self._module.parameters())
        if optimizer and self._optimizer is not None:
            for parameter, state in self._optimizer.state.items():
                # Counts of steps are single numbers, which a fused optimizer wants on the device.
                tensors = ((name, value) for name, value in state.items() if isinstance(value, torch.Tensor))
                yield from ((value, (id(parameter), name)) for name, value in tensors if value.dim())

    def _apply(self, move: Callable[[Tensor, _Key], Tensor], module: bool, optimizer: bool) -> None:
        if module:
            self._apply_to_module(move)
        if optimizer and self._optimizer is not None:
            states = {id(parameter): state for parameter, state in self._optimizer.state.items()}
            for value, key in list(self._state(module=False, optimizer=True)):
                owner, name = key
                states[owner][name] = _replaced(value, move, key)

    def _apply_to_module(self, move: Callable[[Tensor, _Key], Tensor]) -> None:
        weights = {id(parameter) for parameter in self._module.parameters()}
        moved: set[int] = set()

        def replace(tensor: Tensor) -> Tensor:
            # Buffers and gradients stay, and tied weights, which are visited twice, move once.
            if id(tensor) not in weights or id(tensor) in moved:
                return tensor
            moved.add(id(tensor))
            return _replaced(tensor, move, (id(tensor), _WEIGHT))

        # Module._apply keeps the identity of parameters, and FSDP2 extends it to follow their new storage.
        self._module._apply(replace)  # type: ignore[no-untyped-call]


_WEIGHT = ""
#: Attribute of a sharded tensor with this rank's part, which has the key of the whole.
_SHARD = "_local_tensor"


def _replaced(tensor: Tensor, move: Callable[[Tensor, _Key], Tensor], key: _Key) -> Tensor:
    """Return a tensor with moved data; of a sharded or quantized one, its parts move."""
    # Typed so, because the checker takes a tensor for none of the kind.
    plain: Any = tensor
    if not is_traceable_wrapper_subclass(plain):
        return move(tensor.detach(), key)
    owner, name = key

    def move_part(part: str, inner: Any) -> Any:
        if not isinstance(inner, torch.Tensor):
            return inner  # such as the mesh of a sharded tensor
        return _replaced(inner, move, (owner, name if part == _SHARD else f"{name}.{part}"))

    # A sharded tensor keeps its own layout: building one from its mesh would move a part in host memory back.
    moved: Tensor = transform_subclass(plain, move_part)  # type: ignore[no-untyped-call]
    return moved
