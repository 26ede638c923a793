"""Weights into a module that was built, and maybe sharded, without memory for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

# There is no public name for the place of a shard in its tensor.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rollcast.errors import ConfigError
from rollcast_engine.hf import ValueModel
from rollcast_engine.weights import describe_differences

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from rollcast_engine.weights import WeightFolder

__all__ = ["VALUE_HEAD", "Read", "fill_module", "local_region", "match_names", "names_by_tensor", "remake_buffers"]

log = logging.getLogger(__name__)

#: What of a value model a folder need not hold: it starts at zero.
VALUE_HEAD = ("score.weight", "score.bias")
#: From a name in the module's state dict and a slice a dimension to that part of the tensor.
Read = Callable[[str, Sequence[slice]], "Tensor"]


def local_region(tensor: Tensor) -> tuple[slice, ...]:
    """Which part of a tensor this rank holds: all of it, unless it is sharded."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def fill_module(module: nn.Module, read: Read, device: torch.device) -> None:
    """Give a module on the meta device memory on ``device``, and this rank's part of every tensor.

    One tensor is read at a time; what is read of it is this rank's part. Tied weights stay tied.
    """
    filled: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in filled:
            filled[id(tensor)] = _fill(tensor, name, read, device)
        state[name] = filled[id(tensor)]
    module.load_state_dict(state, assign=True)


def _fill(tensor: Tensor, name: str, read: Read, device: torch.device) -> Tensor:
    region = local_region(tensor)
    # A copy in any case: what was read may lie in the pages of a file.
    local = torch.empty([each.stop - each.start for each in region], dtype=tensor.dtype, device=device)
    if local.numel():
        local.copy_(read(name, region))
    value: Tensor = local
    if isinstance(tensor, DTensor):
        value = DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    return nn.Parameter(value, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


def names_by_tensor(module: nn.Module) -> dict[str, list[str]]:
    """Names of each parameter and saved buffer: under its first name all that it is tied to."""
    firsts: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        found.setdefault(firsts.setdefault(id(tensor), name), []).append(name)
    return found


def match_names(module: nn.Module, folder: WeightFolder, optional: Sequence[str] = ()) -> dict[str, str]:
    """For each name in the module's state dict the name of its tensor in the folder.

    A folder of a model without its head has names without the body's prefix, and may hold a tied weight
    by any of its names. What ``optional`` names may be absent, or of another shape, and is then left out.

    Raises:
        ConfigError: names tensors that the folder lacks, or has with another shape.
    """
    body: Any = module.body if isinstance(module, ValueModel) else module
    prefix = f"{body.base_model_prefix}." if body.base_model_prefix else ""
    tensors: dict[str, Tensor] = module.state_dict(keep_vars=True)
    matched: dict[str, str] = {}
    missing: list[str] = []
    for first, names in names_by_tensor(module).items():
        candidates = [*names, *(name.removeprefix(prefix) for name in names)]
        found = next((name for name in candidates if name in folder), None)
        if first in optional and (found is None or folder.shapes[found] != tuple(tensors[first].shape)):
            continue
        if found is not None:
            matched.update(dict.fromkeys(names, found))
        else:
            missing.append(first)
    wrong = [name for name, theirs in matched.items() if folder.shapes[theirs] != tuple(tensors[name].shape)]
    known = {*tensors, *(name.removeprefix(prefix) for name in tensors), *matched.values()}
    unexpected = sorted(name for name in folder.shapes if name not in known)
    if missing or wrong:
        shapes = [f"{name} ({folder.shapes[matched[name]]}, not {tuple(tensors[name].shape)})" for name in wrong]
        raise ConfigError(
            f"the weights in {folder.folder} are not those of the model in its config.json: the folder "
            f"{describe_differences(missing, unexpected, shapes)}"
        )
    if unexpected and not isinstance(module, ValueModel):
        log.warning("%s holds tensors that the model has no use for: %s", folder.folder, ", ".join(unexpected[:5]))
    return matched


def remake_buffers(module: nn.Module, folder: Path) -> bool:
    """Compute the buffers that no file holds, such as the rotary embedding's frequencies, in host memory.

    Returns:
        Whether that was possible: their owners may not know how to.
    """
    body: Any = module.body if isinstance(module, ValueModel) else module
    saved = set(module.state_dict(keep_vars=True))
    for prefix, part in module.named_modules():
        names = [
            name
            for name, buffer in part.named_buffers(recurse=False)
            if buffer.is_meta and f"{prefix}.{name}".removeprefix(".") not in saved
        ]
        if not names:
            continue
        for name in names:
            buffer = part.get_buffer(name)
            if not buffer.is_floating_point():
                log.info("%s: buffer %s.%s cannot be computed anew", folder, prefix, name)
                return False
            setattr(part, name, torch.full(buffer.shape, float("nan"), dtype=buffer.dtype))
        with torch.no_grad():
            body._init_weights(part)
        if any(bool(part.get_buffer(name).isnan().any()) for name in names):
            log.info("%s: buffers of %s cannot be computed anew", folder, prefix)
            return False
    return True
