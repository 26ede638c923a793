"""Serialization of a DataProto as a small header and buffers, which are the memory of the tensors.

A buffer contains exactly the bytes of the rows of one tensor, in C order. Contiguous tensors, including row slices,
are not copied; others are copied once. A reader's tensors are views of the buffers that it receives, and are read-only
if the buffers are. Under Ray, received columns are in shared memory: clone them before writing to them in place.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from rollcast.errors import DataProtoError
from rollcast.protocol import _jagged as jagged
from rollcast.protocol._columns import Columns, kind_of
from rollcast.protocol._objects import ObjectColumn, object_array

WIRE_VERSION = 1


class TensorSpec(NamedTuple):
    """The layout of a tensor in a buffer; ``buffer`` is -1 for a tensor without elements."""

    dtype: str
    shape: tuple[int, ...]
    buffer: int


class ColumnSpec(NamedTuple):
    """A column's kind and tensors: one if dense, two if jagged, none or one if objects."""

    name: str
    kind: str
    tensors: tuple[TensorSpec, ...]


class Header(NamedTuple):
    """The in-band part of a serialized DataProto: everything except its buffers.

    Attributes:
        specs: Column specs, in order.
        objects: Distinct objects in use, by object column.
    """

    version: int
    length: int
    specs: tuple[ColumnSpec, ...]
    objects: dict[str, list[Any]]
    meta_info: dict[str, Any]


class _Packer:
    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []
        self._seen: dict[int, tuple[torch.Tensor, TensorSpec]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> TensorSpec:
        if id(tensor) in self._seen:
            return self._seen[id(tensor)][1]
        spec = TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), -1)
        if tensor.numel():
            spec = spec._replace(buffer=len(self.buffers))
            self.buffers.append(_bytes_of(name, tensor))
        # Keep a reference to the tensor, so that its id is not reused.
        self._seen[id(tensor)] = (tensor, spec)
        return spec


def _bytes_of(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta or tensor.is_quantized:
        raise DataProtoError(
            f"column {name!r} cannot be sent: it is a {'meta' if tensor.is_meta else 'quantized'}"
            " tensor, which has no plain bytes"
        )
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # A single row of a strided slice is contiguous, but view() rejects its stride.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def pack(
    length: int, columns: Mapping[str, torch.Tensor], meta_info: dict[str, Any]
) -> tuple[Header, list[torch.Tensor]]:
    """Serialize to a header and buffers, which are non-empty one-dimensional uint8 CPU tensors.

    Only tensors that are not on the CPU or not contiguous are copied.

    Raises:
        DataProtoError: a column has no plain bytes (meta, quantized); names the column.
    """
    packer = _Packer()
    specs: list[ColumnSpec] = []
    objects: dict[str, list[Any]] = {}
    shifted: dict[int, torch.Tensor] = {}
    for name, column in columns.items():
        tensors: tuple[TensorSpec, ...]
        if isinstance(column, ObjectColumn):
            positions, used = column.compact()
            objects[name] = used.tolist()
            each_once = np.array_equal(positions, np.arange(len(used)))
            tensors = () if each_once else (packer.add(name, torch.from_numpy(positions)),)
        elif jagged.is_jagged(column):
            values, offsets = jagged.trimmed(column)
            # Shared offsets are sent once, so that the receiver's columns share them too.
            offsets = shifted.setdefault(id(jagged.offsets_of(column)), offsets)
            tensors = (packer.add(name, values), packer.add(name, offsets))
        else:
            tensors = (packer.add(name, column),)
        specs.append(ColumnSpec(name, kind_of(column), tensors))
    return Header(WIRE_VERSION, length, tuple(specs), objects, meta_info), packer.buffers


@cache
def _silence_read_only_warning() -> None:
    # Torch warns once per process about a tensor on read-only memory, which every reader of shared memory creates.
    # Suppressing warnings on each read would change the filters of other threads, so trigger the only warning here.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        torch.frombuffer(b"\0", dtype=torch.uint8)


def _unpack_tensor(spec: TensorSpec, buffers: Sequence[Any]) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise DataProtoError(f"this torch has no dtype {spec.dtype!r}")
    if spec.buffer < 0:
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(buffers[spec.buffer], dtype=dtype).reshape(spec.shape)


def unpack(header: Header, buffers: Sequence[Any]) -> Columns:
    """Build columns on ``buffers`` (objects with the buffer protocol) without copying.

    Raises:
        DataProtoError: the sender uses another version of the format, or a spec does not match this torch or its
            buffer.
    """
    if header.version != WIRE_VERSION:
        raise DataProtoError(
            f"a DataProto arrived in wire version {header.version}, but this rollcast reads"
            f" {WIRE_VERSION}; install one version on all nodes"
        )
    _silence_read_only_warning()
    offsets: dict[int, torch.Tensor] = {}
    columns: Columns = {}
    for spec in header.specs:
        try:
            tensors = [_unpack_tensor(tensor, buffers) for tensor in spec.tensors]
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise DataProtoError(f"column {spec.name!r} does not fit its buffer: {error}") from error
        if spec.kind == "object":
            used = header.objects[spec.name]
            rows = tensors[0] if tensors else torch.arange(len(used))
            columns[spec.name] = ObjectColumn.wrap(rows, object_array(used, len(used)))
        elif spec.kind == "jagged":
            shared = offsets.setdefault(spec.tensors[1].buffer, tensors[1])
            columns[spec.name] = jagged.build(tensors[0], shared)
        else:
            columns[spec.name] = tensors[0]
    return columns
