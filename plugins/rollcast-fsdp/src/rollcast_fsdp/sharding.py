"""Everything that knows how FSDP2 shards a module over ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast.controller.worker import WorkerContext
    from rollcast_fsdp.schemas import FsdpConfig

__all__ = ["Sharding", "full_tensor", "shard_module"]

log = logging.getLogger(__name__)

_MANAGED_MARK = "_is_fsdp_managed_module"


@dataclass(frozen=True)
class Sharding:
    """A sharded module's mesh, and what FSDP2 does with it."""

    module: nn.Module
    mesh: DeviceMesh
    reshard_after_forward: bool

    def _fsdp_modules(self) -> list[FSDPModule]:
        return [module for module in self.module.modules() if isinstance(module, FSDPModule)]

    def set_gradient_sync(self, enabled: bool) -> None:
        """Whether the next backward reduces gradients over the ranks, or only accumulates them."""
        for module in self._fsdp_modules():
            module.set_requires_gradient_sync(enabled, recurse=False)

    def reshard(self) -> None:
        """Give up gathered weights, so that ``parameters()`` are the shards the optimizer knows."""
        for module in self._fsdp_modules():
            module.reshard()

    def reset(self) -> None:
        """Forget a forward or backward that an exception broke off."""
        if isinstance(self.module, FSDPModule) and hasattr(self.module, "reset_iter_state"):
            self.module.reset_iter_state()

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Full weights on every rank for the time being, so that forwards need no collective."""
        modules = self._fsdp_modules()
        for module in modules:
            module.unshard()
            module.set_reshard_after_forward(False, recurse=False)
        # By this mark, transformers' generate() would keep ranks in step with a collective a token.
        setattr(self.module, _MANAGED_MARK, False)
        try:
            yield
        finally:
            setattr(self.module, _MANAGED_MARK, True)
            for module in modules:
                module.reshard()
                # FSDP2 keeps the root's weights between forward and backward in any case.
                is_layer = id(module) != id(self.module)
                module.set_reshard_after_forward(is_layer and self.reshard_after_forward, recurse=False)


def shard_module(module: nn.Module, config: FsdpConfig, context: WorkerContext, device: torch.device) -> Sharding:
    """Shard each layer and the rest of ``module`` in place over all ranks, which hold equal copies."""
    mesh = init_device_mesh(device.type, (context.world_size,), mesh_dim_names=("fsdp",))
    options: dict[str, Any] = {"mesh": mesh}
    if config.computes_in_bf16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = _layers(module)
    if not layers:
        log.warning("%s names no layers to shard by; it is sharded, and gathered, as one piece", type(module).__name__)
    for layer in layers:
        fully_shard(layer, reshard_after_forward=config.reshard_after_forward, **options)
    fully_shard(module, reshard_after_forward=False, **options)
    return Sharding(module, mesh, config.reshard_after_forward)


def full_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """The whole tensor on ``device`` without gradient; gathered over the ranks if it is sharded."""
    tensor = tensor.detach().to(device)
    if isinstance(tensor, DTensor):
        whole: Tensor = tensor.full_tensor()
        return whole
    return tensor


def _layers(module: nn.Module) -> list[nn.Module]:
    """Decoder layers, by the class names that transformers' models say must not be split."""
    names: set[str] = set()
    for part in module.modules():
        names.update(getattr(part, "_no_split_modules", None) or ())
    return [part for part in module.modules() if type(part).__name__ in names]
