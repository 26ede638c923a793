"""Sharding of a module over ranks with FSDP2."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from rollcast_engine.hf import DTYPES
from rollcast_engine.keys import EngineKeyError

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast.contracts.worker import WorkerContext
    from rollcast_fsdp.schemas import FsdpConfig

__all__ = ["Sharding", "check_heads", "decoder_layers", "full_tensor", "full_tensors", "local_part", "shard_module"]

log = logging.getLogger(__name__)

_MANAGED_MARK = "_is_fsdp_managed_module"
#: Maximum bytes that ranks gather in one collective; a larger tensor is gathered alone.
_GATHERED_BYTES = 64 << 20


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without a copy; a tensor that is not sharded is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Sharding:
    """The mesh of a sharded module, and operations on its FSDP2 state.

    Attributes:
        module: the sharded module.
        mesh: ``[ranks]``, or ``[copies, ranks of a copy]`` (HSDP); FSDP2 averages gradients over both dimensions.
        reshard_after_forward: config key of this name.
        data_group: process group of the ranks with different rows, this one included.
        sequence_group: process group of the ranks with other parts of the same rows; None if each has whole rows.
    """

    module: nn.Module
    mesh: DeviceMesh
    reshard_after_forward: bool
    data_group: Any
    sequence_group: Any = None

    def _fsdp_modules(self) -> list[FSDPModule]:
        return [module for module in self.module.modules() if isinstance(module, FSDPModule)]

    def set_gradient_sync(self, enabled: bool) -> None:
        """Set whether the next backward also reduces gradients over the copies of the model.

        Over the ranks of a copy every backward reduces, so that no rank ever holds gradients of the whole model.
        """
        if self.mesh.ndim == 1:
            return
        for module in self._fsdp_modules():
            module.set_requires_all_reduce(enabled, recurse=False)

    def reshard(self) -> None:
        """Free gathered weights, so that ``parameters()`` are the shards that the optimizer knows."""
        for module in self._fsdp_modules():
            module.reshard()

    def reset(self) -> None:
        """Reset FSDP2's state after an exception interrupted a forward or backward."""
        if isinstance(self.module, FSDPModule) and hasattr(self.module, "reset_iter_state"):
            self.module.reset_iter_state()

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Keep full weights on every rank during the block, so that forwards need no collective."""
        modules = self._fsdp_modules()
        for module in modules:
            module.unshard()
            module.set_reshard_after_forward(False, recurse=False)
        # With this mark set, transformers' generate() would run a collective per token to keep ranks in step.
        setattr(self.module, _MANAGED_MARK, False)
        try:
            yield
        finally:
            setattr(self.module, _MANAGED_MARK, True)
            for module in modules:
                module.reshard()
                # FSDP2 keeps the root's weights between forward and backward in any case, so reset layers only.
                is_layer = id(module) != id(self.module)
                module.set_reshard_after_forward(is_layer and self.reshard_after_forward, recurse=False)


def shard_module(module: nn.Module, config: FsdpConfig, context: WorkerContext, device: torch.device) -> Sharding:
    """Shard each layer and the rest of ``module`` in place over the ranks, which hold equal copies."""
    ranks, size = context.world_size, config.shard_size(context.world_size)
    if size == ranks:
        mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("fsdp",))
    else:
        mesh = init_device_mesh(device.type, (ranks // size, size), mesh_dim_names=("ddp", "fsdp"))
    parts = config.ulysses_sequence_parallel_size
    if parts == 1:
        data_group, sequence_group = dist.group.WORLD, None
    else:
        places = init_device_mesh(device.type, (ranks // parts, parts), mesh_dim_names=("dp", "sp"))
        data_group, sequence_group = places.get_group("dp"), places.get_group("sp")
    _shard(module, config, mesh)
    return Sharding(module, mesh, config.reshard_after_forward, data_group, sequence_group)


def check_heads(config: Any, parts: int, world_size: int) -> None:
    """Check that the ranks per sequence divide the model's attention heads.

    Args:
        config: transformers config of the model.
        parts: ``ulysses_sequence_parallel_size``.
        world_size: ranks of the group.

    Raises:
        EngineKeyError: they do not; the message names valid numbers.
    """
    heads = int(config.get_text_config().num_attention_heads)
    if heads % parts:
        fitting = [size for size in range(1, world_size + 1) if heads % size == 0 and world_size % size == 0]
        raise EngineKeyError(
            "ulysses_sequence_parallel_size",
            f"is {parts}, but the model's {heads} attention heads do not divide by it; "
            f"with {world_size} ranks use one of {', '.join(map(str, fitting))}",
        )


def _shard(module: nn.Module, config: FsdpConfig, mesh: DeviceMesh) -> None:
    options: dict[str, Any] = {"mesh": mesh}
    if config.mixes_precision:
        reduce = config.reduce_dtype or ("fp32" if config.param_dtype else config.model_dtype)
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=DTYPES[config.param_dtype or config.model_dtype], reduce_dtype=DTYPES[reduce]
        )
    if config.offload_policy:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    layers = decoder_layers(module)
    if not layers:
        log.warning("%s declares no layers to shard; it is sharded and gathered as one unit", type(module).__name__)
    sharded = [fully_shard(layer, reshard_after_forward=config.reshard_after_forward, **options) for layer in layers]
    fully_shard(module, reshard_after_forward=False, **options)
    if config.forward_prefetch:
        for layer, following in pairwise(sharded):
            layer.set_modules_to_forward_prefetch([following])


def full_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the whole tensor on ``device`` without gradient; gathered over the ranks if it is sharded."""
    tensor = tensor.detach().to(device)
    if isinstance(tensor, DTensor):
        whole: Tensor = tensor.full_tensor()
        return whole
    return tensor


def full_tensors(
    named: Iterable[tuple[str, Tensor]], device: torch.device, limit: int = _GATHERED_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors on ``device`` without gradient, in order; all ranks must iterate to the end together.

    Consecutive shards are gathered in one collective: a model has hundreds of small tensors, and each collective waits
    for every rank.

    Args:
        named: names and tensors, sharded or not.
        device: device of the whole tensors.
        limit: bytes of the whole tensors in one collective; a larger tensor is gathered alone.
    """
    waiting: list[tuple[str, DTensor]] = []
    held = 0
    for name, tensor in named:
        size = tensor.numel() * tensor.element_size()
        if waiting and (held + size > limit or not _travels_with(tensor, waiting[0][1])):
            yield from _gather(waiting, device)
            waiting, held = [], 0
        if isinstance(tensor, DTensor) and _travels_with(tensor, tensor):
            waiting.append((name, tensor))
            held += size
        else:
            yield name, full_tensor(tensor, device)
    if waiting:
        yield from _gather(waiting, device)


def _travels_with(tensor: Tensor, first: DTensor) -> bool:
    """Return True if a tensor's rows are sharded over the ranks of ``first``, with the same dtype."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh != first.device_mesh or tensor.dtype != first.dtype:
        return False
    *copies, rows = tensor.placements
    return rows == Shard(0) and all(isinstance(copy, Replicate) for copy in copies)


def _gather(named: list[tuple[str, DTensor]], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    mesh = named[0][1].device_mesh
    ranks = mesh.size(mesh.ndim - 1)
    # All ranks contribute as many rows as the first; the last ones are padded.
    lengths = [-(-tensor.shape[0] // ranks) * math.prod(tensor.shape[1:]) for _, tensor in named]
    part = torch.empty(sum(lengths), dtype=named[0][1].dtype, device=device)
    for (_, tensor), room in zip(named, part.split(lengths), strict=True):  # type: ignore[no-untyped-call]
        local = tensor.to_local().detach().reshape(-1)
        room[: len(local)].copy_(local)
    whole = part.new_empty(ranks * len(part))
    # The name since torch 2.13; the old name warns there.
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    gather(whole, part, group=mesh.get_group(mesh.ndim - 1))
    parts = whole.view(ranks, -1).split(lengths, dim=1)  # type: ignore[no-untyped-call]
    for (name, tensor), rows in zip(named, parts, strict=True):
        yield name, rows.reshape(-1)[: tensor.numel()].view(tensor.shape)


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """Return the decoder layers: modules of the classes in transformers' ``_no_split_modules``."""
    names: set[str] = set()
    for part in module.modules():
        names.update(getattr(part, "_no_split_modules", None) or ())
    return [part for part in module.modules() if type(part).__name__ in names]
