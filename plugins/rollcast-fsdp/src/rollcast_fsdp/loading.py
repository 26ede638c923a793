"""Loading weights into a module on the meta device, sharded or not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

# torch has no public function for the region of a shard in its tensor.
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

#: Tensors of a value model that a folder may lack: the head starts at zero.
VALUE_HEAD = ("score.weight", "score.bias")
#: Function that reads the region (one slice per dimension) of a tensor, named as in the module's state dict.
Read = Callable[[str, Sequence[slice]], "Tensor"]


def local_region(tensor: Tensor) -> tuple[slice, ...]:
    """Return the region of a tensor that this rank holds: all of it, unless it is sharded."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def fill_module(module: nn.Module, read: Read, device: torch.device) -> None:
    """Allocate a meta-device module on ``device``, and fill this rank's region of every tensor.

    Tensors are read one at a time, and only this rank's region. Tied weights stay tied.
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
    # Always a copy: a read tensor may share memory with a mapped file.
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
    """Return for the first name of each parameter and persistent buffer all names that are tied to it."""
    firsts: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        found.setdefault(firsts.setdefault(id(tensor), name), []).append(name)
    return found


def match_names(module: nn.Module, folder: WeightFolder, optional: Sequence[str] = ()) -> dict[str, str]:
    """Return for each name in the module's state dict the name of its tensor in the folder.

    The folder of a model without its head has names without the body's prefix, and may store a tied weight under any of
    its names. Tensors named in ``optional`` are left out if they are absent or have another shape.

    Raises:
        ConfigError: the folder lacks tensors or has them in another shape; the message names them.
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
        log.warning("%s contains tensors that the model does not use: %s", folder.folder, ", ".join(unexpected[:5]))
    return matched


def remake_buffers(module: nn.Module, folder: Path) -> bool:
    """Recompute non-persistent buffers, such as the rotary embedding's frequencies, in host memory.

    Returns:
        False if the modules that own them cannot compute them.
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
                log.info("%s: buffer %s.%s cannot be recomputed", folder, prefix, name)
                return False
            setattr(part, name, torch.full(buffer.shape, float("nan"), dtype=buffer.dtype))
        with torch.no_grad():
            body._init_weights(part)
        if any(bool(part.get_buffer(name).isnan().any()) for name in names):
            log.info("%s: buffers of %s cannot be recomputed", folder, prefix)
            return False
    return True
