"""Loading weights into a module on the meta device, sharded or not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

# torch has no public function for the region of a shard in its tensor.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import transform_subclass

from rollcast.contracts.weights import checkpoint_tensors
from rollcast.errors import ConfigError
from rollcast_engine.hf import ValueModel, transformer
from rollcast_engine.weights import describe_differences

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast_engine.weights import WeightFolder

__all__ = [
    "VALUE_HEAD",
    "Read",
    "fill_module",
    "local_region",
    "match_names",
    "meta_parameters",
    "names_by_tensor",
    "read_stacked",
]

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


def fill_module(module: nn.Module, read: Read, device: torch.device, home: torch.device) -> None:
    """Allocate a meta-device module, and fill this rank's region of every tensor.

    Tensors are read one at a time, and only this rank's region. Tied weights stay tied.

    Args:
        module: the module; its parameters may be sharded.
        read: function that reads a region of a tensor.
        device: device of the persistent buffers.
        home: device of the parameters.
    """
    filled: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in filled:
            place = home if isinstance(tensor, nn.Parameter) else device
            filled[id(tensor)] = _fill(tensor, name, read, place)
        state[name] = filled[id(tensor)]
    module.load_state_dict(state, assign=True)


def _fill(tensor: Tensor, name: str, read: Read, device: torch.device) -> Tensor:
    region = local_region(tensor)
    # Always a copy: a read tensor may share memory with a mapped file.
    local = torch.empty([axis.stop - axis.start for axis in region], dtype=tensor.dtype, device=device)
    # Also if this rank holds nothing of it: reading may be a collective.
    local.copy_(read(name, region))
    value: Tensor = local
    if isinstance(tensor, DTensor):
        # Not from_local(), which would move a part in host memory to the mesh's device.
        value = transform_subclass(  # type: ignore[no-untyped-call]
            tensor.detach(), lambda _, inner: local if isinstance(inner, torch.Tensor) else inner
        )
    return nn.Parameter(value, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


def names_by_tensor(module: nn.Module) -> dict[str, list[str]]:
    """Return for the first name of each parameter and persistent buffer all names that are tied to it.

    Names are those of a checkpoint.
    """
    firsts: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    tensors = _checkpoint_tensors(module)
    for name, tensor in tensors.items():
        names.setdefault(firsts.setdefault(id(tensor), name), []).append(name)
    return names


def match_names(module: nn.Module, folder: WeightFolder, optional: Sequence[str] = ()) -> dict[str, str]:
    """Return for each checkpoint name of the module's tensors the name of the tensor in the folder.

    The folder of a model without its head has names without the body's prefix, and may store a tied weight under any of
    its names. Tensors named in ``optional`` are left out if they are absent or have another shape.

    Raises:
        ConfigError: the folder lacks tensors or has them in another shape; the message names them.
    """
    body: Any = module.body if isinstance(module, ValueModel) else module
    prefix = f"{body.base_model_prefix}." if body.base_model_prefix else ""
    tensors = _checkpoint_tensors(module)
    matched: dict[str, str] = {}
    missing: list[str] = []
    for first, names in names_by_tensor(module).items():
        candidates = [*names, *(name.removeprefix(prefix) for name in names)]
        file = next((name for name in candidates if name in folder), None)
        if first in optional and (file is None or folder.shapes[file] != tuple(tensors[first].shape)):
            continue
        if file is not None:
            matched.update(dict.fromkeys(names, file))
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


def _checkpoint_tensors(module: nn.Module) -> dict[str, Tensor]:
    return checkpoint_tensors(transformer(module), module.state_dict(keep_vars=True))


def read_stacked(parts: Mapping[str, tuple[int, slice]], region: Sequence[slice], like: Tensor, read: Read) -> Tensor:
    """Return a region of a tensor of stacked experts, ``[experts, rows, columns]``, read matrix by matrix.

    Args:
        parts: expert and rows of each matrix by its checkpoint name.
        region: slices of the region, with bounds.
        like: tensor with the dtype of the result.
        read: function that reads a region of a matrix.
    """
    experts, rows, columns = region
    result = torch.empty([axis.stop - axis.start for axis in region], dtype=like.dtype)
    for name, (expert, own) in parts.items():
        start, stop = max(own.start, rows.start), min(own.stop, rows.stop)
        if experts.start <= expert < experts.stop and start < stop:
            matrix = read(name, (slice(start - own.start, stop - own.start), columns))
            result[expert - experts.start, start - rows.start : stop - rows.start] = matrix
    return result


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Put every parameter that a module creates during the block on the meta device, and leave buffers as they are.

    Buffers are small, and modules compute them where they are created: in ``__init__``, whatever the version of
    transformers. The memory of a parameter is never touched, because its initial value is written to the meta device.
    """
    register = nn.Module.register_parameter

    def register_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = type(param)(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
