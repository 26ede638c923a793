"""Results of operations on fake tensors, of the shapes that equal operations had before.

torch remembers them as well, and describes each argument at length for it, which took half of the time of a dry run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from rollcast_dryrun.schemas import is_view, leaves_of, written_arguments

__all__ = ["run_on_fakes"]

#: Values that are equal only if their operations' results have the same shapes.
_PLAIN = (type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_VARIABLE = (
    torch.Tag.inplace_view,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
)


@dataclass(frozen=True)
class _Shape:
    """The layout of a result; ``offset`` is that of a view in its argument's memory, None for new memory."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int | None


@dataclass(frozen=True)
class _Results:
    """Results of an operation in a container of type ``kind``; without one the only result, and without shapes none.

    An operation in place returns its first argument.
    """

    shapes: tuple[_Shape, ...] = ()
    kind: type | None = None
    in_place: bool = False


#: Operation and arguments → results; None if they cannot be made from shapes.
_KNOWN: dict[Any, _Results | None] = {}


def run_on_fakes(mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation on fake tensors in ``mode``."""
    key = _key_of(func, args, kwargs)
    known = None if key is None else _KNOWN.get(key)
    if known is None:
        with mode:
            result = func(*args, **kwargs)
        if key is not None and key not in _KNOWN:
            _KNOWN[key] = _describe(func, args, leaves_of((args, kwargs)), result)
        return result
    if known.in_place:
        return args[0]
    results = [_make(mode, shape, args) for shape in known.shapes]
    if known.kind is not None:
        return known.kind(results)
    return results[0] if results else None


@cache
def _depends_on_shapes(func: Any) -> bool:
    """Return True if an operation's results have new memory, that of its first argument, or are this argument."""
    written = written_arguments(func)
    returned = [value.alias_info for value in func._schema.returns]
    writes_first = [place for place, _ in written] == [0] and len(returned) <= 1
    aliases = any(alias is not None for alias in returned)
    return (
        func.namespace == "aten"
        and not any(tag in _VARIABLE for tag in func.tags)
        and (writes_first if written else is_view(func) or not aliases)
    )


def _key_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what decides the results' shapes; None if that is not known."""
    if not _depends_on_shapes(func):
        return None
    parts: list[Any] = [func, torch.get_default_dtype()]
    is_known = _add_parts(args, parts) and (not kwargs or _add_parts([*kwargs, *kwargs.values()], parts))
    return tuple(parts) if is_known else None


def _add_parts(values: Sequence[Any], parts: list[Any]) -> bool:
    """Add what is known of arguments to a key; return False if one is of an unknown kind."""
    for value in values:
        if isinstance(value, FakeTensor):
            if value.constant is not None or value.layout is not torch.strided or value.is_complex():
                return False
            parts += (value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device)
        elif isinstance(value, int | float):
            parts += (type(value), value)
        elif isinstance(value, list | tuple):
            parts.append(len(value))
            if not _add_parts(value, parts):
                return False
        elif isinstance(value, _PLAIN):
            parts.append(value)
        else:
            return False
    return True


def _describe(func: Any, args: tuple[Any, ...], leaves: list[Any], result: Any) -> _Results | None:
    if result is None or (isinstance(result, list | tuple) and not result):
        return _Results(kind=None if result is None else type(result))
    if written_arguments(func):
        return _Results(in_place=True) if result is args[0] else None
    storages = {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, torch.Tensor)}
    shapes = []
    for part in result if isinstance(result, list | tuple) else [result]:
        if not isinstance(part, FakeTensor) or part.layout is not torch.strided or part.is_complex():
            return None
        storage = part.untyped_storage()
        shares = storage._cdata in storages
        if shares and not (is_view(func) and storage._cdata == args[0].untyped_storage()._cdata):
            return None
        offset = int(part.storage_offset())
        if not shares and (offset or storage.nbytes() != _least_bytes(part)):
            return None
        shape = _Shape(tuple(part.shape), part.stride(), part.dtype, part.fake_device, offset if shares else None)
        shapes.append(shape)
    return _Results(tuple(shapes), type(result) if isinstance(result, list | tuple) else None)


def _least_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to its last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _make(mode: FakeTensorMode, shape: _Shape, args: tuple[Any, ...]) -> FakeTensor:
    with in_kernel_invocation_manager(mode):
        content = torch.empty_strided(shape.sizes, shape.strides, dtype=shape.dtype, device="meta")
        if shape.offset is not None:
            content.set_(args[0].untyped_storage(), shape.offset, shape.sizes, shape.strides)
    return FakeTensor(mode, content, shape.device)
