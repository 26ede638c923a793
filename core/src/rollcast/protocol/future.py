"""DataProtoFuture: a handle to a batch whose columns stay in a runtime's store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch

from rollcast.errors import DataProtoError
from rollcast.protocol import _columns as ops
from rollcast.protocol import _jagged as jagged
from rollcast.protocol._rows import Pick
from rollcast.protocol._table import Content, Table, missing
from rollcast.protocol._values import copy_meta
from rollcast.protocol.batch import DataProto

__all__ = ["DataProtoFuture", "Fetch", "StoredShard", "store_batch"]

Fetch = Callable[[Sequence[Any], "float | None"], list[Any]]
Resolve = Callable[["float | None"], Any]
Dtype = torch.dtype | type[object]


class _Inline(NamedTuple):
    """A local batch in place of a stored one; it travels with the handle."""

    value: DataProto


class Piece(NamedTuple):
    """Rows ``start`` to ``stop`` of column ``key`` of the DataProto that ``ref`` stands for."""

    ref: Any
    key: str
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start

    def trimmed(self) -> Piece:
        """Return a local piece cut to its rows, for sending; a stored one as it is."""
        if not isinstance(self.ref, _Inline):
            return self
        rows = self.ref.value.select([self.key]).slice(self.start, self.stop)
        return Piece(_Inline(rows), self.key, 0, self.rows)


@dataclass(frozen=True)
class StoredColumn:
    """One column of a handle.

    Attributes:
        dtype: ``object`` for an object column.
        pieces: In order; joined they are the column, unless there is an ``index``.
        index: int64 ``[rows]`` into the joined pieces.
    """

    dtype: Dtype
    pieces: tuple[Piece, ...]
    index: torch.Tensor | None = None

    def take(self, pick: Pick) -> StoredColumn:
        """Return the picked rows; nothing moves."""
        if self.index is not None:
            return replace(self, index=self.index[pick.as_index()])._compact()
        span = pick.span
        if span is None or span.step != 1:
            return replace(self, index=pick.as_index())._compact()
        kept: list[Piece] = []
        offset = 0
        for piece in self.pieces:
            start, stop = max(span.start - offset, 0), min(span.stop - offset, piece.rows)
            if start < stop:
                kept.append(piece._replace(start=piece.start + start, stop=piece.start + stop))
            offset += piece.rows
        # An empty column keeps one piece, which knows its row shape and dtype.
        return replace(self, pieces=tuple(kept) or tuple(p._replace(stop=p.start) for p in self.pieces[:1]))

    def _compact(self) -> StoredColumn:
        """Return the column without the pieces that the index does not reach."""
        if self.index is None or len(self.pieces) < 2 or not len(self.index):
            return self
        sizes = torch.tensor([piece.rows for piece in self.pieces])
        owner = torch.searchsorted(sizes.cumsum(0), self.index, right=True)
        used = torch.zeros_like(sizes).index_fill(0, owner, 1)
        if bool(used.all()):
            return self
        removed_before = (sizes * (1 - used)).cumsum(0)
        pieces = tuple(piece for piece, keep in zip(self.pieces, used.tolist(), strict=True) if keep)
        return replace(self, pieces=pieces, index=self.index - removed_before[owner])

    @staticmethod
    def concat(columns: Sequence[StoredColumn]) -> StoredColumn:
        """Join the rows of all columns; nothing moves."""
        first = columns[0]
        pieces = tuple(piece for column in columns for piece in column.pieces)
        if all(column.index is None for column in columns):
            return replace(first, pieces=tuple(piece for piece in pieces if piece.rows) or pieces[:1])
        offset, parts = 0, []
        for column in columns:
            base = sum(piece.rows for piece in column.pieces)
            parts.append((torch.arange(base) if column.index is None else column.index) + offset)
            offset += base
        return replace(first, pieces=pieces, index=torch.cat(parts))._compact()


class StoredShard(Content[StoredColumn]):
    """A description of a DataProto that a worker keeps, sent in its place."""

    __slots__ = ()


def _unbound(refs: Sequence[Any], timeout: float | None) -> list[Any]:  # noqa: ARG001  # a Fetch
    raise DataProtoError("this handle is not connected to a store; bind(fetch) connects it")


class DataProtoFuture(Table[StoredColumn]):
    """A handle to the result of a non-blocking call, whose rows stay in the workers' store.

    Length, keys and dtypes are known as soon as the call has ended; asking for them waits for the end. A
    handle has the operations of a :class:`~rollcast.protocol.DataProto`, with the same meaning of names and lengths,
    and they move no data. A worker that gets a handle fetches its own rows and columns from
    where they are. ``handle["x"]`` fetches one column, :meth:`get` all.

    Args:
        resolve: Waits for the call, at most for the given seconds, and returns a StoredShard, a handle,
            or the call's result if that is no DataProto.
        fetch: Returns the stored values of references.
        ready: Returns True if ``resolve`` would not wait.
    """

    def __init__(self, resolve: Resolve, fetch: Fetch = _unbound, ready: Callable[[], bool] | None = None) -> None:
        self._resolve = resolve
        self._fetch = fetch
        self._ready = ready
        self._shard: StoredShard | None = None
        self._other: tuple[Any, ...] = ()
        self._whole: DataProto | None = None

    @classmethod
    def of_shard(cls, shard: StoredShard, fetch: Fetch = _unbound) -> Self:
        """Return a handle to a shard that a worker has stored."""
        return cls(lambda _: shard, fetch).wait()

    @classmethod
    def of_batch(cls, data: DataProto) -> Self:
        """Wrap a local batch as a handle; its rows are sent inline."""
        return cls.of_shard(store_batch(data, _Inline))

    def bind(self, fetch: Fetch) -> Self:
        """Return the same handle, with rows fetched by ``fetch``."""
        return self if self.wait()._other else self.of_shard(self._content(), fetch)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.wait()._other:
            return _of_value, self._other
        length, columns, meta = self._content()
        trimmed = {
            name: replace(column, pieces=tuple(piece.trimmed() for piece in column.pieces))
            for name, column in columns.items()
        }
        return DataProtoFuture.of_shard, (StoredShard(length, trimmed, meta),)

    # ---- waiting ----

    def wait(self, timeout: float | None = None) -> Self:
        """Wait until the call has ended, without fetching anything.

        Raises:
            WorkerError: the call failed, or the deadline (seconds) passed.
        """
        if self._shard is None and not self._other:
            found = self._resolve(timeout)
            if isinstance(found, DataProtoFuture):
                found = found._content()
            if isinstance(found, StoredShard):
                self._shard = found._replace(meta_info=copy_meta(found.meta_info))
            else:
                self._other = (found,)
        return self

    def done(self) -> bool:
        """Return True if :meth:`wait` would return at once."""
        return self._shard is not None or bool(self._other) or self._ready is None or self._ready()

    def get(self, timeout: float | None = None) -> Any:
        """Return the DataProto, or the call's other result; later calls return the same object.

        Raises:
            WorkerError: the call failed, or the deadline (seconds) passed.
        """
        self.wait(timeout)
        if self._other:
            return _fetched(self._other[0], timeout)
        if self._whole is None:
            self._whole = _build(self._content(), self._fetch, timeout)
        return self._whole

    # ---- reading ----

    def dtypes(self) -> dict[str, Dtype]:
        """Return the dtype of each tensor column; ``object`` for object columns."""
        return {name: column.dtype for name, column in self._content().columns.items()}

    @property
    def meta_info(self) -> dict[str, Any]:
        """The meta dict."""
        return self._content().meta_info

    def _read(self, name: str) -> Any:
        if name not in self:
            raise missing(name, self.keys())
        return (self.select([name]).get() if self._whole is None else self._whole)[name]

    def __repr__(self) -> str:
        if self._shard is None:
            return "DataProtoFuture(in flight)" if not self._other else f"DataProtoFuture({self._other[0]!r})"
        return f"DataProtoFuture(rows={self._shard.length}, columns={list(self._shard.columns)})"

    # ---- operations ----

    @property
    def _precedence(self) -> int:
        return 1 if self._fetch is _unbound else 2

    def _content(self) -> StoredShard:
        self.wait()
        if self._shard is None:
            raise DataProtoError(
                f"the call returned a {type(self._other[0]).__name__}, not a DataProto; take it with get()"
            )
        return self._shard

    def _like(self, length: int, columns: Mapping[str, StoredColumn], meta_info: dict[str, Any]) -> Self:
        return self.of_shard(StoredShard(length, columns, meta_info), self._fetch)

    def _accept(self, operation: str, other: object) -> DataProtoFuture:
        if isinstance(other, DataProtoFuture):
            return other
        if not isinstance(other, DataProto):
            raise DataProtoError(f"{operation}: a {type(other).__name__} is neither a DataProto nor a handle to one")
        return DataProtoFuture.of_batch(other)

    @staticmethod
    def _pick(columns: Mapping[str, StoredColumn], pick: Pick) -> dict[str, StoredColumn]:
        return {name: column.take(pick) for name, column in columns.items()}

    @staticmethod
    def _clash(name: str, mine: StoredColumn, theirs: StoredColumn) -> str | None:
        if mine is theirs:
            return None
        return f"column {name!r} is in both, and whether the values are equal cannot be told without moving them"

    @staticmethod
    def _concat(members: Sequence[Mapping[str, StoredColumn]]) -> dict[str, StoredColumn]:
        joined: dict[str, StoredColumn] = {}
        for name, first in members[0].items():
            parts = [member[name] for member in members]
            if len(dtypes := {str(part.dtype) for part in parts}) > 1:
                raise DataProtoError(f"concat: column {name!r} has the dtypes {sorted(dtypes)}")
            joined[name] = first if len(parts) == 1 else StoredColumn.concat(parts)
        return joined

    def with_columns(self, mapping: Mapping[str, Any] | None = None, /, **columns: Any) -> Self:
        """Return these local columns added or replaced; they are sent inline."""
        return self.joined(DataProto.from_single_dict({**(mapping or {}), **columns}), overwrite=True)


def _of_value(value: Any) -> DataProtoFuture:
    return DataProtoFuture(lambda _: value).wait()


def _fetched(value: Any, timeout: float | None) -> Any:
    """Replace the handles in a list or tuple, which a mode may collect from the ranks, by their batches."""
    if isinstance(value, list | tuple):
        return type(value)(each.get(timeout) if isinstance(each, DataProtoFuture) else each for each in value)
    return value


def store_batch(data: DataProto, put: Callable[[DataProto], Any]) -> StoredShard:
    """Store each column by itself, but columns that share ragged offsets together; return the description.

    Args:
        put: Stores a DataProto and returns a reference to it.
    """
    length, columns, meta = data._content()
    together: dict[int, list[str]] = {}
    for name, column in columns.items():
        key = id(jagged.offsets_of(column)) if column.is_nested else -len(together) - 1
        together.setdefault(key, []).append(name)
    dtypes = data.dtypes()
    placed: dict[str, StoredColumn] = {}
    for names in together.values():
        ref = put(data.select(names, meta_info_keys=[]))
        placed |= {name: StoredColumn(dtypes[name], (Piece(ref, name, 0, length),)) for name in names}
    return StoredShard(length, {name: placed[name] for name in columns}, meta)


def _build(shard: StoredShard, fetch: Fetch, timeout: float | None) -> DataProto:
    """Fetch and join; columns with the same rows of the same stored batches are built together.

    Raises:
        DataProtoError: joined pieces differ in dtype or row shape.
    """
    length, columns, meta = shard
    refs = {id(piece.ref): piece.ref for column in columns.values() for piece in column.pieces}
    wanted = [ref for ref in refs.values() if not isinstance(ref, _Inline)]
    stored = dict(zip(map(id, wanted), fetch(wanted, timeout), strict=True)) if wanted else {}
    batches: dict[int, DataProto] = {}
    for key, ref in refs.items():
        found = ref.value if isinstance(ref, _Inline) else stored[key]
        if not isinstance(found, DataProto):
            raise DataProtoError(f"the store returned a {type(found).__name__} where a DataProto was put")
        batches[key] = found
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, column in columns.items():
        index = None if column.index is None else column.index.numpy().tobytes()
        groups.setdefault((*((id(p.ref), p.start, p.stop) for p in column.pieces), index), []).append(name)
    built: dict[str, torch.Tensor] = {}
    for names in groups.values():
        first = columns[names[0]]
        parts = []
        for position, piece in enumerate(first.pieces):
            source = batches[id(piece.ref)]._columns()
            rows = len(batches[id(piece.ref)])
            part = DataProto._of(rows, {name: source[columns[name].pieces[position].key] for name in names}, None)
            whole = piece.start == 0 and piece.stop == rows
            parts.append(part if whole else part.slice(piece.start, piece.stop))
        joined = parts[0] if len(parts) == 1 else DataProto.concat(parts)
        built |= (joined if first.index is None else joined.select_idxs(first.index))._columns()
    ordered = {name: built[name] for name in columns}
    ops.common_length(ordered, length)
    return DataProto._of(length, ordered, meta)
