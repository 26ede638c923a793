"""The object column: one arbitrary Python object per row, inside a TensorDict.

tensordict's own ``NonTensorStack`` has one container per row, so building, slicing and joining it take time
per row. Here the objects are in one immutable table, and the TensorDict contains an int64 tensor of positions in
that table: slicing copies 8 bytes per row and shares the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch

from rollcast.protocol._values import same_value

# Functions that move rows and keep their values. Any other function that returns a tensor is refused, because
# numbers computed from positions in a table are meaningless.
_MOVES = frozenset(
    """
    __getitem__ alias broadcast_to chunk clone contiguous cpu cuda data detach expand expand_as flatten flip
    gather index_select masked_select movedim narrow permute pin_memory repeat repeat_interleave reshape
    reshape_as roll select split split_with_sizes squeeze take_along_dim tensor_split tile to transpose unbind
    unflatten unsqueeze view view_as
    """.split()  # noqa: SIM905  # a list would take a line per name
)
_EQUALITIES = frozenset({"eq", "__eq__", "ne", "__ne__"})


def object_array(values: Iterable[Any], count: int) -> np.ndarray:
    """Return a read-only one-dimensional object array; nested sequences stay single objects."""
    array = np.fromiter(values, dtype=object, count=count)
    array.flags.writeable = False
    return array


class ObjectColumn(torch.Tensor):
    """A column of Python objects that TensorDict treats as an int64 tensor ``[B]``.

    Indexing, slicing, joining, splitting, repeating and cloning it, alone or as part of a
    TensorDict, move objects like tensor rows. ``tolist()``, ``numpy()``, ``item()`` and iteration
    return the objects. Arithmetic and in-place writes raise ``TypeError``.
    """

    _table: np.ndarray
    _rows: torch.Tensor

    @staticmethod
    def wrap(rows: torch.Tensor, table: np.ndarray) -> ObjectColumn:
        """Build a column of the objects ``table[rows]`` without copying the one-dimensional ``table``."""
        column = rows.as_subclass(ObjectColumn)
        column._table, column._rows = table, rows
        return column

    @staticmethod
    def of(values: Sequence[Any] | np.ndarray) -> ObjectColumn:
        """Build a column with one row per item of ``values``, or per entry of an array's first dimension."""
        count = len(values)
        if isinstance(values, np.ndarray):
            # tolist() would unpack the inner dimensions into lists.
            values = values.tolist() if values.ndim == 1 else list(values)
        return ObjectColumn.wrap(torch.arange(count), object_array(values, count))

    @property
    def rows(self) -> torch.Tensor:
        """Positions in ``table``, a plain int64 tensor of this column's shape."""
        return self._rows

    @property
    def table(self) -> np.ndarray:
        """Read-only object array with at least the objects of this column."""
        return self._table

    def objects(self) -> np.ndarray:
        """Return the objects as a read-only object array of this column's shape."""
        picked = np.asarray(self._table[self.rows.cpu().numpy()], dtype=object)
        picked.flags.writeable = False
        return picked

    def compact(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ``(positions, used)``: ``used`` has each object in use once, ``positions`` each row's index in it."""
        rows = self.rows.cpu().numpy()
        used, positions = np.unique(rows, return_inverse=True)
        return positions.reshape(rows.shape), self._table[used]

    def tolist(self) -> Any:
        """Return the objects as a list nested like the shape; without dimensions, return the object itself."""
        rows = self.rows
        return self._table[int(rows)] if rows.dim() == 0 else self.objects().tolist()

    def item(self) -> Any:
        """Return the only object of a column with one element."""
        return self._table[int(self.rows.item())]

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """Return the objects as a read-only object array; ``force`` has no effect."""
        return self.objects()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        values = self.objects()
        return values if dtype is None else values.astype(dtype)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tolist())

    def __contains__(self, value: Any) -> bool:
        return any(same_value(value, item) for item in self.objects().ravel().tolist())

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ObjectColumn({self.tolist()!r:.200})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ObjectColumn:
        positions, used = self.compact()
        table = object_array([deepcopy(item, memo) for item in used.tolist()], len(used))
        return ObjectColumn.wrap(torch.from_numpy(positions), table)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        positions, used = self.compact()
        return _rebuild, (positions, used.tolist())

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(func, "__self__").__name__  # noqa: B009 - a getset descriptor
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if name in {"cat", "concat", "concatenate", "stack"} and "out" not in kwargs:
                return _join(func, args, kwargs)
            if name in _EQUALITIES and len(args) == 2:
                return _equal_elements(args[0], args[1], name.strip("_") == "ne")
            first = args[0] if args else None
            if name in _MOVES and isinstance(first, ObjectColumn):
                return _carry(func(*args, **kwargs), first._table)
            # In-place writes are refused before they happen.
            if name in {"__setitem__", "__set__"} or (name.endswith("_") and name[-2:] != "__"):
                raise _refusal(name)
            result = func(*args, **kwargs)
            if isinstance(result, torch.Tensor):
                raise _refusal(name)
            return result


def _rebuild(positions: np.ndarray, objects: list[Any]) -> ObjectColumn:
    return ObjectColumn.wrap(torch.from_numpy(positions), object_array(objects, len(objects)))


def _refusal(name: str) -> TypeError:
    return TypeError(
        f"an object column does not support {name}(); it holds Python objects: take them with"
        " tolist() and put a new column in its place"
    )


def _carry(value: Any, table: np.ndarray) -> Any:
    if isinstance(value, ObjectColumn):  # contiguous() and its like may return the column itself
        return value
    if isinstance(value, torch.Tensor):
        return ObjectColumn.wrap(value, table)
    if isinstance(value, (tuple, list)):
        return type(value)(_carry(item, table) for item in value)
    return value


def join_tables(columns: Sequence[ObjectColumn]) -> tuple[list[torch.Tensor], np.ndarray]:
    """Merge the tables of several columns; return each column's positions in the common table, and the table."""
    first = columns[0].table
    if all(column.table is first for column in columns):
        return [column.rows for column in columns], first
    positions: list[torch.Tensor] = []
    tables: list[np.ndarray] = []
    offset = 0
    for column in columns:
        # Merge only objects in use, so that a slice of a large batch does not keep all its objects alive.
        here, used = column.compact()
        positions.append(torch.from_numpy(here + offset))
        tables.append(used)
        offset += len(used)
    table = np.concatenate(tables)
    table.flags.writeable = False
    return positions, table


def _join(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ObjectColumn:
    columns = args[0]
    if not all(isinstance(column, ObjectColumn) for column in columns):
        raise TypeError("an object column joins only with other object columns")
    positions, table = join_tables(columns)
    return ObjectColumn.wrap(func(positions, *args[1:], **kwargs), table)


def _equal_elements(left: Any, right: Any, negate: bool) -> torch.Tensor:
    column, other = (left, right) if isinstance(left, ObjectColumn) else (right, left)
    mine = column.objects().ravel().tolist()
    if isinstance(other, ObjectColumn):
        if other.shape != column.shape:
            raise TypeError(f"object columns of {tuple(column.shape)} and {tuple(other.shape)} rows")
        others = other.objects().ravel().tolist()
    else:
        others = [other] * len(mine)
    same = [same_value(a, b) != negate for a, b in zip(mine, others, strict=True)]
    return torch.tensor(same, dtype=torch.bool).reshape(column.rows.shape)
