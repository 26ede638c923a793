"""A handle to a DataProto that workers compute or keep: its rows move only to who reads them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch

from rollcast.errors import DataProtoError
from rollcast.protocol import columns as ops
from rollcast.protocol.dataproto import DataProto
from rollcast.protocol.rows import Pick, RowSelector, pick_index, pick_rows, pick_slice
from rollcast.protocol.sizes import check_count, padding_rows, require_divisible
from rollcast.protocol.stored import Dtype, Fetch, Inline, StoredColumn, StoredShard, build_columns, store_batch
from rollcast.protocol.values import copy_meta, merge_meta

__all__ = ["DataProtoFuture"]


def _unbound(refs: Sequence[Any], timeout: float | None) -> list[Any]:  # noqa: ARG001  # a Fetch
    raise DataProtoError("this handle is not connected to a store; bind(fetch) connects it")


class _Table:
    """What a handle knows of its rows without having them."""

    def __init__(self, length: int, columns: Mapping[str, StoredColumn], meta_info: Mapping[str, Any]) -> None:
        self.length = length
        self.columns = dict(columns)
        self.meta_info = copy_meta(meta_info)


Resolve = Callable[["float | None"], Any]


class DataProtoFuture:
    """The result of a non-blocking call, in the workers' store.

    Length, keys and dtypes are known as soon as the call has ended (asking for them waits for
    that). Choosing, renaming and joining columns or rows moves no data. Given to another group,
    each worker fetches the rows and columns that are its own from where they are. ``handle["x"]``
    fetches one column, :meth:`get` all.

    Args:
        resolve: waits for the call, at most for the given seconds, and returns a StoredShard, a
            handle, or, of a call that gives something else than a DataProto, that.
        fetch: returns what references of the store stand for.
        ready: whether ``resolve`` would return without waiting.
    """

    def __init__(self, resolve: Resolve, fetch: Fetch = _unbound, ready: Callable[[], bool] | None = None) -> None:
        self._resolve = resolve
        self._fetch = fetch
        self._ready = ready
        self._table: _Table | None = None
        self._other: tuple[Any, ...] = ()
        self._whole: DataProto | None = None

    # ---- making one ----

    @classmethod
    def of_shard(cls, shard: StoredShard, fetch: Fetch = _unbound) -> Self:
        """A handle to what a worker has stored."""
        return cls._of(_Table(*shard), fetch)

    @classmethod
    def of_batch(cls, data: DataProto) -> Self:
        """A handle to a batch that is at hand; what of it is sent to workers travels with the handle."""
        return cls._of(_Table(*store_batch(data, Inline)), _unbound)

    @classmethod
    def _of(cls, table: _Table, fetch: Fetch) -> Self:
        made = cls(lambda _: None, fetch)
        made._table = table
        return made

    def bind(self, fetch: Fetch) -> Self:
        """The same handle, with rows fetched by ``fetch``."""
        return self if self.wait()._other else self._of(self._known(), fetch)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.wait()._other:
            return _of_value, self._other
        table = self._known()
        columns = {name: column.trimmed() for name, column in table.columns.items()}
        return _from_parts, (StoredShard(table.length, columns, table.meta_info),)

    # ---- waiting ----

    def wait(self, timeout: float | None = None) -> Self:
        """Wait until the call has ended, without fetching anything.

        Raises:
            WorkerError: the call failed, or the deadline (seconds) passed.
        """
        if self._table is None and not self._other:
            found = self._resolve(timeout)
            if isinstance(found, StoredShard):
                self._table = _Table(*found)
            elif isinstance(found, DataProtoFuture):
                self._table = found._known()
            else:
                self._other = (found,)
        return self

    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._table is not None or bool(self._other) or self._ready is None or self._ready()

    def get(self, timeout: float | None = None) -> Any:
        """The DataProto, or whatever else the call returned; later calls return the same object.

        Raises:
            WorkerError: the call failed, or the deadline (seconds) passed.
        """
        self.wait(timeout)
        if self._other:
            return _each_got(self._other[0], timeout)
        if self._whole is None:
            table = self._known()
            built = build_columns(table.columns, table.length, self._fetch, timeout)
            built.meta_info = copy_meta(table.meta_info)
            self._whole = built
        return self._whole

    def _known(self) -> _Table:
        self.wait()
        if self._table is None:
            raise DataProtoError(
                f"the call returned a {type(self._other[0]).__name__}, not a DataProto; take it with get()"
            )
        return self._table

    # ---- looking at it ----

    def __len__(self) -> int:
        return self._known().length

    def keys(self) -> list[str]:
        """The names of all columns."""
        return list(self._known().columns)

    def dtypes(self) -> dict[str, Dtype]:
        """The dtype of each tensor column; ``object`` for object columns."""
        return {name: column.dtype for name, column in self._known().columns.items()}

    @property
    def meta_info(self) -> dict[str, Any]:
        """The meta dict."""
        return self._known().meta_info

    def __contains__(self, key: object) -> bool:
        return key in self._known().columns

    def __getitem__(self, key: str | RowSelector) -> Any:
        """A column, which is fetched; or a handle to the chosen rows.

        Raises:
            ColumnError: no column of that name.
        """
        if not isinstance(key, str):
            return self._take(pick_rows(key, len(self)))
        if self._whole is not None:
            return self._whole[key]
        return self.select([key]).get()[key]

    def __repr__(self) -> str:
        if self._table is None:
            return "DataProtoFuture(under way)" if not self._other else f"DataProtoFuture({self._other[0]!r})"
        return f"DataProtoFuture(rows={self._table.length}, columns={list(self._table.columns)})"

    # ---- columns ----

    def _named(self, keys: Iterable[str] | str) -> list[str]:
        names = [keys] if isinstance(keys, str) else list(keys)
        for name in names:
            if name not in self:
                raise ops.missing(name, self.keys())
        return names

    def _with(self, columns: Mapping[str, StoredColumn], length: int | None = None) -> Self:
        table = self._known()
        return self._of(_Table(table.length if length is None else length, columns, table.meta_info), self._fetch)

    def select(self, keys: Iterable[str] | str) -> Self:
        """Only these columns; raises ``ColumnError`` for one that is not there."""
        columns = self._known().columns
        return self._with({name: columns[name] for name in self._named(keys)})

    def drop(self, keys: Iterable[str] | str) -> Self:
        """All columns but these; raises ``ColumnError`` for one that is not there."""
        gone = set(self._named(keys))
        return self._with({name: column for name, column in self._known().columns.items() if name not in gone})

    def pop(self, keys: Iterable[str] | str) -> tuple[Self, Self]:
        """``(rest, taken)``: :meth:`drop` and :meth:`select`."""
        names = self._named(keys)
        return self.drop(names), self.select(names)

    def rename(self, mapping: Mapping[str, str]) -> Self:
        """Columns under new names, in their old places.

        Raises:
            ColumnError: an old name is not there.
            DataProtoError: two columns would have one name.
        """
        self._named(mapping)
        renamed: dict[str, StoredColumn] = {}
        for old, column in self._known().columns.items():
            new = mapping.get(old, old)
            if new in renamed:
                raise DataProtoError(f"rename: two columns would be called {new!r}")
            renamed[new] = column
        return self._with(renamed)

    def union(self, other: DataProto | DataProtoFuture, overwrite: bool = False) -> Self:
        """The columns and meta of both, which have one length.

        Raises:
            DataProtoError: lengths differ; or a column is in both and ``overwrite`` is off: whether
                the values are equal cannot be told without fetching them.
        """
        added = other if isinstance(other, DataProtoFuture) else DataProtoFuture.of_batch(other)
        mine, theirs = self._known(), added._known()
        if mine.length != theirs.length:
            raise DataProtoError(f"union: {mine.length} rows here but {theirs.length} in the other")
        both = sorted(
            name for name, column in theirs.columns.items() if name in mine.columns and mine.columns[name] is not column
        )
        if both and not overwrite:
            raise DataProtoError(
                f"union: columns {both} are in both, and whether they are equal cannot be told without moving "
                "them; drop or rename them, or pass overwrite=True"
            )
        meta = merge_meta([mine.meta_info, theirs.meta_info], "union", overwrite=overwrite)
        fetch = self._fetch if self._fetch is not _unbound else added._fetch
        return self._of(_Table(mine.length, {**mine.columns, **theirs.columns}, meta), fetch)

    def with_columns(self, mapping: Mapping[str, Any] | None = None, /, **columns: Any) -> Self:
        """These columns, which are at hand, added or replaced."""
        given = DataProto.from_single_dict({**(mapping or {}), **columns})
        return self.union(given, overwrite=True)

    # ---- rows ----

    def _take(self, pick: Pick) -> Self:
        return self._with({name: column.take(pick) for name, column in self._known().columns.items()}, pick.rows)

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """The rows of a Python slice."""
        return self._take(pick_slice(slice(start, end, step), len(self)))

    def select_idxs(self, idxs: Sequence[int] | Sequence[bool] | torch.Tensor | np.ndarray) -> Self:
        """The rows of these numbers, in this order, or where a mask ``[len]`` is true."""
        return self._take(pick_index(idxs, len(self)))

    def reorder(self, indices: Sequence[int] | torch.Tensor | np.ndarray) -> Self:
        """The rows in the order of ``indices [len]``, a permutation."""
        pick = pick_index(indices, len(self))
        if not torch.equal(pick.as_index(torch.device("cpu")).sort().values, torch.arange(len(self))):
            raise DataProtoError(f"reorder: these {pick.rows} indices are no permutation of {len(self)} rows")
        return self._take(pick)

    def repeat(self, times: int, interleave: bool = True) -> Self:
        """Every row ``times`` times: ``aabb`` if interleaved, ``abab`` if not."""
        check_count("repeat: times", times, minimum=0)
        rows = torch.arange(len(self))
        index = rows.repeat_interleave(times) if interleave else rows.repeat(times)
        return self._take(Pick(None, index, index.numel()))

    def chunk(self, chunks: int) -> list[Self]:
        """``chunks`` handles of equal length, in order; empty ones if there are no rows.

        Raises:
            DataProtoError: ``chunks`` does not divide the length.
        """
        require_divisible("chunk", len(self), check_count("chunk: chunks", chunks), "chunks")
        size = len(self) // chunks
        return [self.slice(number * size, (number + 1) * size) for number in range(chunks)]

    def split(self, size: int) -> list[Self]:
        """Handles of ``size`` rows; the last may be shorter, and there is at least one."""
        check_count("split: size", size)
        return [self.slice(start, start + size) for start in range(0, max(len(self), 1), size)]

    def pad_to_divisor(self, divisor: int, mode: Any = "last") -> tuple[Self, int]:
        """``(padded, pad_size)``; see :meth:`DataProto.pad_to_divisor`."""
        index, pad_size = padding_rows(len(self), check_count("pad: divisor", divisor), mode)
        return (self._take(Pick(None, index, index.numel())), pad_size) if pad_size else (self.slice(), 0)

    def unpad(self, pad_size: int) -> Self:
        """Without the last ``pad_size`` rows."""
        if check_count("unpad: pad_size", pad_size, minimum=0) > len(self):
            raise DataProtoError(f"unpad: {pad_size} rows cannot be taken off {len(self)}")
        return self.slice(0, len(self) - pad_size)

    @staticmethod
    def concat(members: Sequence[DataProto | DataProtoFuture]) -> DataProtoFuture:
        """The rows of all members, in order, as one handle.

        Raises:
            DataProtoError: no members; keys or dtypes differ; a meta key has different values.
        """
        if not members:
            raise DataProtoError("concat: the list is empty, so the columns are unknown")
        handles = [each if isinstance(each, DataProtoFuture) else DataProtoFuture.of_batch(each) for each in members]
        tables = [handle._known() for handle in handles]
        columns: dict[str, StoredColumn] = {}
        for position, table in enumerate(tables):
            if odd := sorted(table.columns.keys() ^ tables[0].columns.keys()):
                raise DataProtoError(f"concat: columns {odd} are not in both member 0 and member {position}")
        for name, first in tables[0].columns.items():
            parts = [table.columns[name] for table in tables]
            kinds = {str(part.dtype) for part in parts}
            if len(kinds) > 1:
                raise DataProtoError(f"concat: column {name!r} has the dtypes {sorted(kinds)}")
            columns[name] = first if len(parts) == 1 else StoredColumn.concat(parts)
        meta = merge_meta([table.meta_info for table in tables], "concat")
        fetch = next((handle._fetch for handle in handles if handle._fetch is not _unbound), _unbound)
        return DataProtoFuture._of(_Table(sum(map(operator.attrgetter("length"), tables)), columns, meta), fetch)


def _each_got(value: Any, timeout: float | None) -> Any:
    """A mode may collect a list of the ranks' results, each of which is a handle."""
    if isinstance(value, list | tuple):
        return type(value)(each.get(timeout) if isinstance(each, DataProtoFuture) else each for each in value)
    return value


def _of_value(value: Any) -> DataProtoFuture:
    return DataProtoFuture(lambda _: value).wait()


def _from_parts(shard: StoredShard) -> DataProtoFuture:
    return DataProtoFuture.of_shard(shard)
