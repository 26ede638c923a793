"""DataProto: the batch that every stage of training reads and returns."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from copy import deepcopy
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from rollcast.errors import DataProtoError
from rollcast.protocol import _columns as ops
from rollcast.protocol import _rows, _storage, _wire
from rollcast.protocol._objects import ObjectColumn
from rollcast.protocol._rows import Pick
from rollcast.protocol._table import Content, Table, missing
from rollcast.protocol._values import copy_meta, same_value

if TYPE_CHECKING:
    from tensordict import TensorDict, TensorDictBase


class DataProto(Table[torch.Tensor]):
    """A batch: columns of tensors, jagged tensors and Python objects, and a dict of metadata.

    **Names refer to columns, lengths and indices to rows.** ``"x" in batch``, ``batch["x"]``, ``batch.keys()``,
    ``dict(batch)`` and ``**batch`` access columns, as for a dict of columns. ``len(batch)`` counts rows, and
    ``batch[3]``, ``batch[2:5]`` and ``batch[[4, 0]]`` select rows, as for a tensor. Iterating over a DataProto is
    ambiguous, so it raises ``TypeError``: iterate over ``keys()`` or ``split(1)``.

    **No operation changes a DataProto.** Each operation returns a new DataProto, which may share tensor storage but
    never shares ``meta_info`` or a container in it. ``union``, ``reorder`` and ``pop``, which change a batch in place
    in verl, raise an error that names the operation to use instead: ``joined``, ``reordered``, ``select`` and ``drop``.
    To change a DataProto, assign to ``.batch[key]`` or ``.non_tensor_batch[key]``, or edit ``.meta_info``.

    Columns received from another process may be in shared read-only memory: call ``clone()`` before writing
    to a tensor in place. Gradients are not sent to other processes.

    Args:
        batch: Tensor columns, or a TensorDict with columns of any kind; its nested tensors must be
            jagged in dimension 1, and its batch size is reduced to the first dimension.
        non_tensor_batch: Object columns, as arrays or lists with one object per row.
        meta_info: Metadata; copied, including its containers.
        length: Number of rows, needed only if there are no columns.

    Raises:
        DataProtoError: columns differ in length or have no length; names the column and the lengths.
    """

    # Columns are in a dict until the first access to `batch`, which moves them to a TensorDict: most batches pass
    # between processes without needing one.
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
        self._fill(ops.common_length(columns, length), columns, meta_info)

    def _fill(self, length: int, columns: Mapping[str, torch.Tensor], meta_info: Mapping[str, Any] | None) -> None:
        self._held = dict(columns)
        self._length = length
        self._tensordict = None
        self.meta_info = copy_meta(meta_info)

    @classmethod
    def _of(cls, length: int, columns: Mapping[str, torch.Tensor], meta_info: Mapping[str, Any] | None) -> Self:
        """Build a DataProto from columns that are known to be valid."""
        made = cls.__new__(cls)
        made._fill(length, columns, meta_info)
        return made

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor | np.ndarray] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        *,
        length: int | None = None,
    ) -> Self:
        """Build a DataProto from tensor columns (tensors or numeric arrays) and object columns (arrays or lists).

        Raises:
            DataProtoError: lengths differ, or a tensor column is neither a tensor nor a numeric array.
        """
        for name, value in (tensors or {}).items():
            if isinstance(ops.as_column(name, value), ObjectColumn):
                raise DataProtoError(
                    f"column {name!r} is a {type(value).__name__}, not a tensor; give it as non_tensors"
                )
        return cls(tensors, non_tensors, meta_info, length=length)

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> Self:
        """Build a DataProto from columns of any kind: tensors and numeric arrays become tensors, others objects."""
        return cls(data, None, meta_info)

    @classmethod
    def from_tensordict(cls, td: TensorDictBase, meta_info: Mapping[str, Any] | None = None) -> Self:
        """Build a DataProto that shares the tensors of a TensorDict, but not its structure."""
        return cls(td, None, meta_info)

    # ---- reading ----

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
        return self._held if self._tensordict is None else ops.from_tensordict(self._tensordict)

    def _column(self, name: str) -> torch.Tensor | None:
        if self._tensordict is None:
            return self._held.get(name)
        value = self._tensordict.get(name, None)
        return None if value is None else ops.as_column(name, value)

    def __len__(self) -> int:
        return self._length

    def keys(self) -> list[str]:
        """Return the names of all columns, in the order in which they were added."""
        return list(self._held) if self._tensordict is None else [str(key) for key in self._tensordict.keys()]  # noqa: SIM118

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key in self.keys()

    def _read(self, name: str) -> Any:
        column = self._column(name)
        if column is None:
            raise missing(name, self.keys())
        return column.objects() if isinstance(column, ObjectColumn) else column

    def local(self, keys: Iterable[str] | str | None = None) -> DataProto:
        """Return these columns (all by default) as a batch with all columns in this process.

        Columns that are stored on workers are fetched together and are not cached.
        """
        return self.select(keys)

    def dtypes(self) -> dict[str, torch.dtype | type[object]]:
        """Return the dtype of each column; ``object`` for object columns."""
        return {
            name: object if isinstance(column, ObjectColumn) else column.dtype
            for name, column in self._columns().items()
        }

    @property
    def nbytes(self) -> int:
        """Size of the rows in bytes; object columns count only 8 bytes per row for positions."""
        return sum(map(ops.column_nbytes, self._columns().values()))

    def check_consistency(self) -> None:
        """Check names, kinds and lengths again; raise ``DataProtoError`` naming the invalid column."""
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

    def equal(self, other: DataProto) -> bool:
        """Return True if keys (in any order), lengths, dtypes, values (NaN equals NaN) and meta are equal."""
        mine, theirs = self._columns(), other._columns()
        return (
            len(self) == len(other)
            and mine.keys() == theirs.keys()
            and all(ops.same_column(mine[name], theirs[name]) for name in mine)
            and same_value(self.meta_info, other.meta_info)
        )

    # ---- operations ----

    _precedence = 0

    def _content(self) -> Content[torch.Tensor]:
        return Content(self._length, self._columns(), self.meta_info)

    def _like(self, length: int, columns: Mapping[str, torch.Tensor], meta_info: dict[str, Any]) -> Self:
        return self._of(length, columns, meta_info)

    @classmethod
    def _promoted(cls, table: Any) -> Any:
        return table if type(table) is cls else cls._of(*table._content())

    def _accept(self, operation: str, other: object) -> DataProto:
        if not isinstance(other, DataProto):
            raise DataProtoError(
                f"{operation}: a {type(other).__name__} is no DataProto; fetch a handle with get(), or start from it"
            )
        return other

    @staticmethod
    def _pick(columns: Mapping[str, torch.Tensor], pick: Pick) -> ops.Columns:
        return {name: ops.take(column, pick) for name, column in columns.items()}

    def _spans(self, size: int) -> list[Self]:
        length, columns, meta = self._content()
        if not length or not columns:
            return super()._spans(size)
        pieces = ops.split(columns, length, size)
        return [self._like(min(size, length - i * size), piece, meta) for i, piece in enumerate(pieces)]

    @staticmethod
    def _clash(name: str, mine: torch.Tensor, theirs: torch.Tensor) -> str | None:
        return None if ops.same_column(mine, theirs) else f"column {name!r} is in both with different values"

    @staticmethod
    def _concat(members: Sequence[Mapping[str, torch.Tensor]]) -> ops.Columns:
        return ops.concat_columns(members)

    def with_columns(self, mapping: Mapping[str, Any] | None = None, /, **columns: Any) -> Self:
        """Return a batch with columns added or replaced; values are converted as in :meth:`from_single_dict`.

        For a DataProto without columns and rows, the new columns determine the length.
        """
        given = {**(mapping or {}), **columns}
        added = {name: ops.as_column(name, value) for name, value in given.items()}
        unset = not self.keys() and not len(self)
        length = ops.common_length(added, None if unset else len(self))
        return self._of(length, {**self._columns(), **added}, self.meta_info)

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int = 1,
        generator: torch.Generator | None = None,
        shuffle: bool = False,
    ) -> Iterator[Self]:
        """Yield mini-batches of ``mini_batch_size`` rows; each epoch yields every row once.

        Args:
            generator: CPU generator for shuffling; by default torch's global generator.
            shuffle: True to shuffle the rows anew in each epoch.

        Raises:
            DataProtoError: the size does not divide the length; raised at the call, not at the first iteration.
        """
        _rows.check_count("make_iterator: mini_batch_size", mini_batch_size)
        _rows.check_count("make_iterator: epochs", epochs, minimum=0)
        _rows.require_divisible("make_iterator", len(self), mini_batch_size, "rows each")
        if generator is not None and not shuffle:
            raise DataProtoError("make_iterator: a generator without shuffle=True has no effect")

        def iterate(rows: Self) -> Iterator[Self]:
            for _ in range(epochs if len(rows) else 0):
                if not shuffle:
                    yield from rows.split(mini_batch_size)
                    continue
                order = torch.randperm(len(rows), generator=generator)
                yield from (rows[index] for index in torch.split(order, mini_batch_size))

        # Iterate over a copy, so that columns assigned during the iteration do not appear halfway.
        return iterate(self.slice())

    # ---- storage and the wire ----

    def to(self, device: torch.device | str) -> Self:
        """Move all tensors to ``device`` (shared if already there); objects stay on the CPU."""
        return self._like(self._length, ops.map_tensors(self._columns(), lambda x: x.to(device)), self.meta_info)

    def clone(self) -> Self:
        """Copy all tensors to new, writable storage; the objects in object columns are shared."""
        return self._like(self._length, ops.map_tensors(self._columns(), torch.clone), self.meta_info)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a file, without pickle; an existing file is replaced atomically.

        Tuples and other objects that JSON would change are refused; numpy scalars in object columns and meta are
        loaded as Python scalars.

        Raises:
            DataProtoError: an object column or meta key cannot be stored as JSON; names the column or key.
        """
        _storage.save(path, self._length, self._columns(), self.meta_info)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file written by :meth:`save`; all tensors are on the CPU.

        Raises:
            DataProtoError: the file has another format, is truncated or is corrupt.
        """
        return cls._of(*_storage.load(path))

    def __copy__(self) -> Self:
        return self._like(*self._content())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        columns = ops.map_tensors(self._columns(), lambda x: x.detach().clone(), lambda column: deepcopy(column, memo))
        return self._like(len(self), columns, deepcopy(self.meta_info, memo))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        header, buffers = _wire.pack(*self._content())
        arrays = [buffer.numpy() for buffer in buffers]
        sent = [PickleBuffer(array.data) if protocol >= 5 else array.tobytes() for array in arrays]
        return _from_wire, (type(self), header, sent)


def _from_wire(cls: type[DataProto], header: _wire.Header, buffers: list[Any]) -> DataProto:
    return cls._of(header.length, _wire.unpack(header, buffers), header.meta_info)


class ObjectColumnsView(MutableMapping[str, Any]):
    """A live view of the object columns of a DataProto.

    Reading a key returns a read-only object array ``[B]``. To change a column, assign a whole list or array to its
    key: writing to the array raises an error, because other DataProtos may share it.
    """

    def __init__(self, owner: DataProto) -> None:
        self._owner = owner

    def __getitem__(self, key: str) -> np.ndarray:
        column = self._owner._column(key) if isinstance(key, str) else None
        if not isinstance(column, ObjectColumn):
            raise missing(key, self, "object column")
        return column.objects()

    def __setitem__(self, key: str, value: Any) -> None:
        column = ops.as_object_column(key, value)
        ops.common_length({key: column}, len(self._owner))
        if key in self._owner and key not in self:
            raise DataProtoError(f"column {key!r} is a tensor; drop it before objects take its name")
        if self._owner._tensordict is None:
            self._owner._held[key] = column
        else:
            self._owner._tensordict.set(key, column)

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise missing(key, self, "object column")
        if self._owner._tensordict is None:
            del self._owner._held[key]
        else:
            self._owner._tensordict.del_(key)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and isinstance(self._owner._column(key), ObjectColumn)

    def __iter__(self) -> Iterator[str]:
        return iter([key for key in self._owner.keys() if key in self])  # noqa: SIM118

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"ObjectColumnsView({list(self)})"
