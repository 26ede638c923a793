"""The three kinds of columns, and the operations on rows and columns for each kind.

A column is a ``torch.Tensor`` whose first dimension is the row:

- dense: strided, ``[B, ...]``, any dtype and device;
- jagged: ``torch.nested`` with ``layout=torch.jagged``, ``[B, ragged, ...]``;
- object: an :class:`~rollcast.protocol._objects.ObjectColumn`, ``[B]``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch

from rollcast.errors import ColumnError, DataProtoError
from rollcast.protocol import _jagged as jagged
from rollcast.protocol import _memory as memory
from rollcast.protocol._objects import ObjectColumn, join_tables
from rollcast.protocol._rows import Pick, pick_slice
from rollcast.protocol._values import same_tensor, same_value

if TYPE_CHECKING:
    from tensordict import TensorDictBase

Columns = dict[str, torch.Tensor]
_NUMERIC_KINDS = "biufc"


class MissingColumnError(ColumnError, KeyError):
    """An error for a missing column; also a ``KeyError``, as expected of mappings."""

    __str__ = Exception.__str__  # KeyError.__str__ would quote the message


def missing(name: object, columns: Iterable[str], what: str = "column") -> MissingColumnError:
    """Build the error for a missing key; the message lists the existing keys."""
    return MissingColumnError(f"no {what} {name!r}; there are {sorted(columns)}")


def check_name(name: object) -> str:
    """Return ``name`` if it is a non-empty string, else raise ``DataProtoError``."""
    if not isinstance(name, str) or not name:
        raise DataProtoError(f"a column name is a non-empty string, not {name!r}")
    return name


def is_tensordict(value: object) -> TypeGuard[TensorDictBase]:
    """Return True if ``value`` is a TensorDict, without importing tensordict."""
    module = sys.modules.get("tensordict")
    return module is not None and isinstance(value, module.TensorDictBase)


def _tensordict_says(predicate: str, value: object) -> bool:
    module = sys.modules.get("tensordict")
    return module is not None and bool(getattr(module, predicate)(value))


def kind_of(column: torch.Tensor) -> str:
    """Return ``"object"``, ``"jagged"`` or ``"dense"``."""
    if isinstance(column, ObjectColumn):
        return "object"
    return "jagged" if jagged.is_jagged(column) else "dense"


def _from_tensor(name: str, value: torch.Tensor) -> torch.Tensor:
    if jagged.is_jagged(value) or value.is_nested:
        try:
            return jagged.canonical(value)
        except ValueError as error:
            raise DataProtoError(f"column {name!r} is a nested tensor, but {error}") from error
    if value.layout != torch.strided:
        raise DataProtoError(f"column {name!r} has layout {value.layout}; call to_dense() on it")
    if value.dim() == 0:
        raise DataProtoError(
            f"column {name!r} is a tensor without dimensions; the first dimension is the row:"
            " expand it to one value per row, or put it in meta_info"
        )
    return value


def _from_numeric(name: str, value: np.ndarray) -> torch.Tensor:
    if not value.flags.writeable or any(stride < 0 for stride in value.strides):
        value = value.copy()  # torch takes neither
    try:
        return _from_tensor(name, torch.from_numpy(value))
    except TypeError as error:
        raise DataProtoError(f"column {name!r}: torch has no dtype for {value.dtype}") from error


def as_column(name: str, value: Any) -> torch.Tensor:
    """Convert ``value`` to a column.

    Tensors, nested tensors and numeric arrays become tensor columns; lists, tuples and all other
    arrays become object columns with one object per item. Storage is shared if possible.

    Raises:
        DataProtoError: the value cannot be a column; names the column.
    """
    check_name(name)
    if isinstance(value, ObjectColumn):
        if value.dim() != 1:
            raise DataProtoError(f"object column {name!r} has shape {tuple(value.shape)}; it needs one dimension")
        return value if value.device.type == "cpu" else value.cpu()
    if isinstance(value, torch.Tensor):
        return _from_tensor(name, value)
    if isinstance(value, jagged.Jagged):
        return value.column()
    if isinstance(value, np.ndarray) and value.dtype.kind in _NUMERIC_KINDS:
        return _from_numeric(name, value)
    return as_object_column(name, value)


def as_object_column(name: str, value: Any) -> ObjectColumn:
    """Convert a list, a tuple or an array to an object column with one object per item.

    Raises:
        DataProtoError: the value is a tensor, a mapping or not a sequence; names the column.
    """
    check_name(name)
    if isinstance(value, ObjectColumn):
        return value
    if _tensordict_says("is_non_tensor", value):
        return _from_non_tensor(name, value)
    if isinstance(value, torch.Tensor):
        raise DataProtoError(f"column {name!r} is a tensor; give it among the tensors")
    if _tensordict_says("is_tensor_collection", value):
        raise DataProtoError(
            f"column {name!r} is a {type(value).__name__}; columns do not nest: call flatten_keys() first"
        )
    if isinstance(value, np.ndarray) and value.ndim:
        return ObjectColumn.of(value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return ObjectColumn.of(value)
    raise DataProtoError(
        f"column {name!r} is a {type(value).__name__}; a column is a tensor, an array or a list"
        " with one item per row (a single value belongs in meta_info)"
    )


def _from_non_tensor(name: str, value: Any) -> ObjectColumn:
    # tensordict stores an array that is assigned to a key as a whole, without the batch size.
    data = getattr(value, "data", None)
    if isinstance(data, np.ndarray) and data.ndim and list(value.batch_size) == [len(data)]:
        return ObjectColumn.of(data)
    if len(value.batch_size) != 1:
        raise DataProtoError(f"column {name!r} has batch size {tuple(value.batch_size)}, not one")
    return ObjectColumn.of(value.tolist())


def from_tensordict(batch: TensorDictBase) -> Columns:
    """Return all columns of a TensorDict, including those written to it as lists."""
    return {str(name): as_column(str(name), batch.get(name)) for name in batch.keys()}  # noqa: SIM118


def common_length(columns: Mapping[str, torch.Tensor], length: int | None = None) -> int:
    """Return the number of rows of the columns; without columns, return ``length`` or 0.

    Raises:
        DataProtoError: two columns, or a column and ``length``, differ in length; names the column and both lengths.
    """
    first = ""
    for name, column in columns.items():
        rows = int(column.shape[0])
        if length is None:
            first, length = name, rows
        elif rows != length:
            than = f"column {first!r} has {length}" if first else f"the DataProto has {length}"
            raise DataProtoError(f"column {name!r} has {rows} rows but {than}; all columns need one length")
    return length or 0


def take(column: torch.Tensor, pick: Pick) -> torch.Tensor:
    """Return the picked rows, as a view for a span or a copy for an index."""
    if isinstance(column, ObjectColumn) and pick.span is not None:
        # The subclass's own indexing takes ten times as long.
        return ObjectColumn.wrap(column.rows[pick.span], column.table)
    if jagged.is_jagged(column):
        return jagged.take(column, pick)
    if pick.span is not None:
        return column[pick.span]
    index = pick.as_index(column.device)
    return column.index_select(0, index) if isinstance(column, ObjectColumn) else memory.index_select(column, index)


def split(columns: Mapping[str, torch.Tensor], length: int, size: int) -> list[Columns]:
    """Split columns into views of ``size`` consecutive rows; the last may have fewer. One torch call per column."""
    spans: list[Pick] = []
    parts: dict[str, Sequence[torch.Tensor]] = {}
    for name, column in columns.items():
        if isinstance(column, ObjectColumn):
            parts[name] = [ObjectColumn.wrap(rows, column.table) for rows in column.rows.split(size)]  # type: ignore[no-untyped-call]
        elif jagged.is_jagged(column):
            spans = spans or [pick_slice(slice(start, start + size), length) for start in range(0, length, size)]
            parts[name] = [jagged.take(column, span) for span in spans]
        else:
            parts[name] = column.split(size)  # type: ignore[no-untyped-call]
    return [dict(zip(parts, piece, strict=True)) for piece in zip(*parts.values(), strict=True)]


def concat_columns(members: Sequence[Mapping[str, torch.Tensor]]) -> Columns:
    """Join the rows of the members, which have the same keys.

    Raises:
        DataProtoError: a column differs between members in kind, dtype, row shape or device.
    """
    ragged: dict[tuple[int, ...], torch.Tensor] = {}
    joined: Columns = {}
    for name in members[0]:
        columns = [member[name] for member in members]
        _check_joinable(name, columns)
        kind = kind_of(columns[0])
        if kind == "object":
            rows, table = join_tables([c for c in columns if isinstance(c, ObjectColumn)])
            joined[name] = ObjectColumn.wrap(torch.cat(rows), table)
        elif kind == "jagged":
            joined[name] = jagged.concat(columns, ragged)
        else:
            joined[name] = memory.concat(columns)
    return joined


def _traits(column: torch.Tensor) -> dict[str, object]:
    held = jagged.values_of(column) if jagged.is_jagged(column) else column
    return {"kind": kind_of(column), "dtype": held.dtype, "row shape": tuple(held.shape[1:]), "device": held.device}


def _check_joinable(name: str, columns: Sequence[torch.Tensor]) -> None:
    first = columns[0]
    if all(isinstance(column, ObjectColumn) for column in columns):
        return
    # Comparing sets takes a third of the time of comparing each column.
    if set(map(type, columns)) == {torch.Tensor} and not first.is_nested:
        kinds = {column.dtype for column in columns}, {column.device for column in columns}
        if all(len(kind) == 1 for kind in kinds) and len({shape[1:] for shape in {c.shape for c in columns}}) == 1:
            return
    expected = _traits(first)
    for position, column in enumerate(columns):
        for trait, value in _traits(column).items():
            if value != expected[trait]:
                raise DataProtoError(
                    f"concat: column {name!r} has {trait} {value} in member {position} but"
                    f" {expected[trait]} in member 0; convert it before joining"
                )


def same_column(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return True if kind, dtype, row shapes and all values are equal; NaN equals NaN."""
    if left is right:
        return True
    kind = kind_of(left)
    if kind != kind_of(right) or left.shape[0] != right.shape[0]:
        return False
    if isinstance(left, ObjectColumn) and isinstance(right, ObjectColumn):
        pairs = zip(left.objects().tolist(), right.objects().tolist(), strict=True)
        return all(same_value(a, b) for a, b in pairs)
    if kind == "jagged":
        lengths = [jagged.offsets_of(column).diff().cpu() for column in (left, right)]
        values = [jagged.trimmed(column)[0] for column in (left, right)]
        return torch.equal(*lengths) and same_tensor(*values)
    return same_tensor(left, right)


def column_nbytes(column: torch.Tensor) -> int:
    """Return the size of a column's rows in bytes: values and offsets if jagged, positions if objects."""
    if isinstance(column, ObjectColumn):
        return column.rows.nbytes
    if jagged.is_jagged(column):
        values, offsets = jagged.trimmed(column)
        return values.nbytes + offsets.nbytes
    return column.nbytes


def map_tensors(
    columns: Mapping[str, torch.Tensor],
    on_tensor: Callable[[torch.Tensor], torch.Tensor],
    on_objects: Callable[[ObjectColumn], ObjectColumn] = lambda column: column,
) -> Columns:
    """Apply ``on_tensor`` to each tensor (once to shared offsets), and ``on_objects`` to each object column."""
    ragged: dict[int, torch.Tensor] = {}
    mapped: Columns = {}
    for name, column in columns.items():
        if isinstance(column, ObjectColumn):
            mapped[name] = on_objects(column)
        elif jagged.is_jagged(column):
            offsets = jagged.offsets_of(column)
            if id(offsets) not in ragged:
                ragged[id(offsets)] = on_tensor(offsets)
            mapped[name] = jagged.build(on_tensor(jagged.values_of(column)), ragged[id(offsets)])
        else:
            mapped[name] = on_tensor(column)
    return mapped
