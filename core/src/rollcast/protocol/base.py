"""What a DataProto is: its columns, its meta dict, and how it is made, read, copied and sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from rollcast.errors import DataProtoError
from rollcast.protocol import columns as ops
from rollcast.protocol import wire
from rollcast.protocol.objects import ObjectColumn
from rollcast.protocol.rows import Pick, RowSelector, pick_rows
from rollcast.protocol.values import copy_meta, same_value
from rollcast.protocol.views import ObjectColumnsView

if TYPE_CHECKING:
    from tensordict import TensorDict, TensorDictBase


class BatchBase:
    """The state of a DataProto, whose operations are in :mod:`rollcast.protocol.dataproto`.

    The columns lie in a TensorDict from the first look at :attr:`batch` on, and in a dict before that:
    most batches go from process to process without one.
    """

    __slots__ = ("__weakref__", "_held", "_length", "_tensordict", "meta_info")

    meta_info: dict[str, Any]
    _length: int
    _held: ops.Columns
    _tensordict: TensorDict | None

    def __init__(
        self,
        batch: TensorDictBase | Mapping[str, Any] | None = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        *,
        length: int | None = None,
    ) -> None:
        if ops.is_tensordict(batch):
            columns = ops.from_tensordict(batch)
            if not columns and length is None and batch.batch_dims:
                length = batch.batch_size[0]
        else:
            columns = {name: ops.as_column(name, value) for name, value in (batch or {}).items()}
        for name, value in (non_tensor_batch or {}).items():
            if name in columns:
                raise DataProtoError(f"column {name!r} is given as a tensor and as objects")
            columns[name] = ops.as_object_column(name, value)
        self._fill(columns, ops.common_length(columns, length), copy_meta(meta_info))

    def _fill(self, columns: ops.Columns, length: int, meta_info: dict[str, Any]) -> None:
        self._held = columns
        self._length = length
        self._tensordict = None
        self.meta_info = meta_info

    @classmethod
    def _of(cls, columns: ops.Columns, length: int, meta_info: Mapping[str, Any] | None) -> Self:
        """From columns that are known to fit; copies the meta dict."""
        made = cls.__new__(cls)
        made._fill(columns, length, copy_meta(meta_info))
        return made

    # ---- making one ----

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor | np.ndarray] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        *,
        length: int | None = None,
    ) -> Self:
        """From tensor columns (numeric arrays too) and object columns (arrays or lists).

        Raises:
            DataProtoError: lengths differ, or a tensor column is neither tensor nor numeric array.
        """
        for name, value in (tensors or {}).items():
            if isinstance(ops.as_column(name, value), ObjectColumn):
                raise DataProtoError(
                    f"column {name!r} is a {type(value).__name__}, not a tensor; give it as non_tensors"
                )
        return cls(tensors, non_tensors, meta_info, length=length)

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> Self:
        """From columns of any kind: tensors and numeric arrays become tensors, the rest objects."""
        return cls(data, None, meta_info)

    @classmethod
    def from_tensordict(cls, td: TensorDictBase, meta_info: Mapping[str, Any] | None = None) -> Self:
        """From a TensorDict, whose tensors are shared and whose structure is not."""
        return cls(td, None, meta_info)

    # ---- looking at it ----

    @property
    def batch(self) -> TensorDict:
        """The live TensorDict ``[len]``; ``dp.batch["x"] = tensor`` changes this DataProto only."""
        if self._tensordict is None:
            from tensordict import TensorDict

            self._tensordict = TensorDict(self._held, batch_size=[self._length])
            self._held = {}
        return self._tensordict

    @property
    def non_tensor_batch(self) -> MutableMapping[str, Any]:
        """The object columns, as a live mapping of read-only object arrays ``[len]``."""
        return ObjectColumnsView(self)

    def _columns(self) -> ops.Columns:
        return dict(self._held) if self._tensordict is None else ops.from_tensordict(self._tensordict)

    def _column(self, name: str) -> torch.Tensor | None:
        """A column, or None."""
        if self._tensordict is None:
            return self._held.get(name)
        value = self._tensordict.get(name, None)
        return None if value is None else ops.as_column(name, value)

    def _set_column(self, name: str, column: torch.Tensor) -> None:
        """Add or replace a column, in place."""
        if self._tensordict is None:
            self._held[name] = column
        else:
            self._tensordict.set(name, column)

    def _delete_column(self, name: str) -> None:
        """Take a column out, in place."""
        if self._tensordict is None:
            del self._held[name]
        else:
            self._tensordict.del_(name)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Self]:
        """One DataProto per row. To go over the columns use :meth:`keys`."""
        return (self[row] for row in range(len(self)))

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key in self.keys()

    def keys(self) -> list[str]:
        """The names of all columns, in the order in which they were added."""
        return list(self._held) if self._tensordict is None else [str(key) for key in self._tensordict.keys()]  # noqa: SIM118

    def __getitem__(self, key: str | RowSelector) -> Any:
        """A column by name (tensor, or object array), or a DataProto of the chosen rows.

        Raises:
            ColumnError: no column of that name (also a ``KeyError``).
            DataProtoError: rows out of range (also an ``IndexError``), or no valid selector.
        """
        if not isinstance(key, str):
            return self._take(pick_rows(key, len(self)))
        column = self._column(key)
        if column is None:
            raise ops.missing(key, self.keys())
        return column.objects() if isinstance(column, ObjectColumn) else column

    def dtypes(self) -> dict[str, torch.dtype | type[object]]:
        """The dtype of each tensor column; ``object`` for object columns."""
        return {
            name: object if isinstance(column, ObjectColumn) else column.dtype
            for name, column in self._columns().items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors' rows; of object columns only the 8 bytes per row of positions."""
        return sum(map(ops.column_nbytes, self._columns().values()))

    def check_consistency(self) -> None:
        """Check names, kinds and lengths again, as at construction.

        Raises:
            DataProtoError: a column does not fit; names it.
        """
        ops.common_length(self._columns(), len(self))

    def __repr__(self) -> str:
        lines = [f"DataProto(rows={len(self)}, {self.nbytes / 1e6:.3g} MB"]
        for name, column in self._columns().items():
            if isinstance(column, ObjectColumn):
                first = f", first: {column[0].item()!r:.40}" if len(self) else ""
                lines.append(f"  {name}: objects{first}")
            else:
                sizes = [str(n) if isinstance(n, int) else "ragged" for n in column.shape[1:]]
                dtype = str(column.dtype).removeprefix("torch.")
                lines.append(f"  {name}: {dtype}[{', '.join(['rows', *sizes])}] {column.device}")
        if self.meta_info:
            lines.append(f"  meta_info: {sorted(map(str, self.meta_info))}")
        return "\n".join(lines) + ")"

    def equal(self, other: BatchBase) -> bool:
        """Same keys, lengths, dtypes, values (NaN equals NaN) and meta; any order of keys."""
        mine, theirs = self._columns(), other._columns()
        return (
            len(self) == len(other)
            and mine.keys() == theirs.keys()
            and all(ops.same_column(mine[name], theirs[name]) for name in mine)
            and same_value(self.meta_info, other.meta_info)
        )

    def _with(self, columns: ops.Columns) -> Self:
        return self._of(columns, len(self), self.meta_info)

    def _take(self, pick: Pick) -> Self:
        return self._of(ops.take_rows(self._columns(), pick), pick.rows, self.meta_info)

    def __copy__(self) -> Self:
        return self._with(self._columns())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        columns = ops.deep_clone(self._columns(), memo)
        return self._of(columns, len(self), deepcopy(self.meta_info, memo))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        header, buffers = wire.encode(self._columns(), len(self), self.meta_info, int(protocol))
        return _from_wire, (type(self), header, buffers)


def _from_wire(cls: type[BatchBase], header: wire.Header, buffers: list[Any]) -> BatchBase:
    return cls._of(wire.decode(header, buffers), header.length, header.meta_info)
