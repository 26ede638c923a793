"""DataProtoFuture: a handle to a batch whose rows stay in a runtime's object store.

A worker stores a batch as one object. A handle describes rows and columns of such objects. Columns with the same rows
share one :class:`RowMap`, so that the time of selecting rows depends on the number of objects, not of columns.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self, cast

import torch

from rollcast.errors import DataProtoError, WorkerError
from rollcast.protocol import _columns as ops
from rollcast.protocol._rows import Pick, pick_slice
from rollcast.protocol._table import Content, Table, missing
from rollcast.protocol._values import copy_meta
from rollcast.protocol.batch import DataProto

__all__ = ["Cut", "DataProtoFuture", "Fetch", "Kept", "Promised", "StoredShard", "promise", "store_batch"]

Resolve = Callable[["float | None"], Any]
Dtype = torch.dtype | type[object]
#: Size in bytes of the damage mark that is stored with each batch.
_MARK_BYTES = 512


class Kept:
    """A stored batch with a mark that a process sets if it has damaged the batch.

    Readers on one node share the memory of the batch and the mark, so all of them see the mark.

    Args:
        batch: The rows.
        mark: Text of the mark, uint8 ``[1, 512]``; zeros if not set.
    """

    __slots__ = ("_mark", "batch")

    def __init__(self, batch: DataProto, mark: DataProto | None = None) -> None:
        self.batch = batch
        self._mark = mark or DataProto({"mark": torch.zeros(1, _MARK_BYTES, dtype=torch.uint8)})

    @property
    def nbytes(self) -> int:
        """Size of the batch in bytes."""
        return self.batch.nbytes

    def with_batch(self, batch: DataProto) -> Kept:
        """Return another batch with the same mark."""
        return Kept(batch, self._mark)

    def damage(self, why: str) -> None:
        """Set the mark; from now on, reading the batch raises an error with the text ``why``."""
        text = why.encode()[:_MARK_BYTES]
        self._mark["mark"][0, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def check(self) -> None:
        """Raise ``DataProtoError`` if the mark is set."""
        mark = self._mark["mark"][0]
        if int(mark[0]):
            text = bytes(mark.tolist()).rstrip(b"\0").decode(errors="replace")
            raise DataProtoError(f"these rows were damaged and cannot be read: {text}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, (self.batch, self._mark)


class Cut(NamedTuple):
    """Rows and columns to read from a stored object, on the node that stores it.

    Attributes:
        ref: Reference to the object.
        columns: Names of the columns to read; None to read the whole object, which may be of any type.
        start, stop: Range of rows, if ``picked`` is None.
        picked: Row numbers, int64 ``[rows]``, ascending; None for consecutive rows.
    """

    ref: Any
    columns: tuple[str, ...] | None = None
    start: int = 0
    stop: int = 0
    picked: torch.Tensor | None = None

    def of(self, stored: Any) -> Any:
        """Return these rows and columns of the stored object, as views if the rows are consecutive.

        Raises:
            DataProtoError: the object is not a batch, or has been damaged.
        """
        if self.columns is None:
            return stored
        if isinstance(stored, Kept):
            stored.check()
            return stored.with_batch(self.of(stored.batch))
        if not isinstance(stored, DataProto):
            raise DataProtoError(f"the store returned a {type(stored).__name__} where a DataProto was put")
        rows = stored.select(self.columns, [])
        if self.picked is not None:
            return rows.select_idxs(self.picked)
        return rows if self.start == 0 and self.stop == len(rows) else rows.slice(self.start, self.stop)


Fetch = Callable[[Sequence[Cut], "float | None"], list[Any]]


class _Inline(NamedTuple):
    """A local batch in place of a stored one; sent with the handle."""

    value: DataProto


class Promised(NamedTuple):
    """A reference to the result of a call that may be in flight: a :class:`StoredShard` of ``rows`` rows."""

    ref: Any
    rows: int


class Piece(NamedTuple):
    """The rows ``start`` to ``stop`` of the object that ``ref`` refers to."""

    ref: Any
    start: int
    stop: int


def _unique(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distinct values in ascending order, and the index of each value among them."""
    distinct, positions = torch.unique(values, return_inverse=True)
    return distinct, positions


class RowMap:
    """Rows of stored objects; columns with the same rows share one map.

    Args:
        pieces: Pieces of stored objects, in order. Concatenated, they are the rows, unless there is an ``index``.
        index: Positions of the rows in the concatenated pieces, int64 ``[rows]``; None for all.
    """

    __slots__ = ("_ends", "index", "pieces")

    def __init__(self, pieces: tuple[Piece, ...], index: torch.Tensor | None = None) -> None:
        self.pieces = pieces
        self.index = index
        self._ends: tuple[list[int], torch.Tensor] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RowMap, (self.pieces, self.index)

    @property
    def ends(self) -> tuple[list[int], torch.Tensor]:
        """Return the end of each piece in the concatenated pieces, as a list and as an int64 tensor."""
        if self._ends is None:
            ends, end = [], 0
            for piece in self.pieces:
                end += piece.stop - piece.start
                ends.append(end)
            self._ends = ends, torch.tensor(ends, dtype=torch.int64)
        return self._ends

    def take(self, pick: Pick) -> tuple[RowMap, slice | list[int]]:
        """Return the picked rows and the indices of the pieces that contain them, without moving data."""
        if self.index is not None:
            return self._indexed(self.index[pick.as_index()])
        span = pick.span
        if span is None or span.step != 1:
            return self._indexed(pick.as_index())
        if span.start >= span.stop:
            # An empty column keeps one piece for its row shape and dtype.
            return RowMap(tuple(Piece(p.ref, p.start, p.start) for p in self.pieces[:1])), slice(0, 1)
        ends = self.ends[0]
        first, last = bisect_right(ends, span.start), bisect_left(ends, span.stop)
        kept = list(self.pieces[first : last + 1])
        ref, start, stop = kept[-1]
        kept[-1] = Piece(ref, start, stop - (ends[last] - span.stop))
        ref, start, stop = kept[0]
        kept[0] = Piece(ref, start + span.start - (ends[first - 1] if first else 0), stop)
        return RowMap(tuple(kept)), slice(first, last + 1)

    def _indexed(self, index: torch.Tensor) -> tuple[RowMap, slice | list[int]]:
        """Return the rows at ``index`` of the concatenated pieces, dropping pieces without such rows."""
        if len(self.pieces) < 2:
            return RowMap(self.pieces, index), slice(None)
        if not len(index):
            return RowMap(self.pieces[:1], index), slice(0, 1)
        ends = self.ends[1]
        used, position = _unique(torch.searchsorted(ends, index, right=True))
        if len(used) == len(self.pieces):
            return RowMap(self.pieces, index), slice(None)
        kept = used.tolist()
        pieces = tuple(self.pieces[number] for number in kept)
        sizes = torch.tensor([piece.stop - piece.start for piece in pieces])
        removed_before = (ends[used] - sizes) - (sizes.cumsum(0) - sizes)
        return RowMap(pieces, index - removed_before[position]), kept

    @staticmethod
    def concat(maps: Sequence[RowMap]) -> RowMap:
        """Concatenate the rows of all maps; drop pieces without rows, but keep at least one piece."""
        if all(each.index is None for each in maps):
            pieces = [piece for each in maps for piece in each.pieces if piece.stop > piece.start]
            return RowMap(tuple(pieces) or maps[0].pieces[:1])
        offset, parts = 0, []
        for each in maps:
            rows = each.ends[0][-1]
            parts.append((torch.arange(rows) if each.index is None else each.index) + offset)
            offset += rows
        return RowMap(tuple(piece for each in maps for piece in each.pieces), torch.cat(parts))

    def reads(self) -> tuple[list[tuple[int, Piece, torch.Tensor | None]], torch.Tensor | None]:
        """Return the reads that fetch the rows, and the order of the rows that they return.

        A read is the position, the rows and the index (or None) of a piece. Each row is read once, however often it is
        picked. The order is None if the rows are read in the requested order.
        """
        if self.index is None:
            return [(number, piece, None) for number, piece in enumerate(self.pieces)], None
        rows, order = _unique(self.index)
        bounds = torch.searchsorted(rows, self.ends[1]).tolist()
        found: list[tuple[int, Piece, torch.Tensor | None]] = []
        before, begin = 0, 0
        for number, (piece, bound, end) in enumerate(zip(self.pieces, bounds, self.ends[0], strict=True)):
            if bound > before or len(self.pieces) == 1:
                local = rows[before:bound] + (piece.start - begin)
                found.append((number, *_as_range(piece.ref, local)))
            before, begin = bound, end
        in_order = len(rows) == len(self.index) and bool((order == torch.arange(len(order))).all())
        return found, None if in_order else order


def _as_range(ref: Any, rows: torch.Tensor) -> tuple[Piece, torch.Tensor | None]:
    """Return ascending rows of an object as a piece, with an index only if the rows are not consecutive."""
    count = len(rows)
    if not count:
        return Piece(ref, 0, 0), None
    first, last = int(rows[0]), int(rows[-1])
    return Piece(ref, first, last + 1), None if last - first + 1 == count else rows


class StoredColumn(NamedTuple):
    """A column of a handle.

    Attributes:
        dtype: dtype of the column; ``object`` for an object column.
        source: Name of the column in the stored objects; a tuple of names, one per piece of ``rows``, if they differ.
        rows: Rows of the column, shared with other columns.
    """

    dtype: Dtype
    source: str | tuple[str, ...]
    rows: RowMap

    def sources(self) -> tuple[str, ...]:
        """Return the column's name in each piece."""
        return (self.source,) * len(self.rows.pieces) if isinstance(self.source, str) else self.source

    def over(self, rows: RowMap, kept: slice | list[int]) -> StoredColumn:
        """Return the column for rows that contain only these pieces."""
        source = self.source
        if not isinstance(source, str):
            source = source[kept] if isinstance(kept, slice) else tuple(source[number] for number in kept)
        return StoredColumn(self.dtype, source, rows)


class StoredShard(Content[StoredColumn]):
    """A description of a DataProto that a worker has stored, sent instead of the DataProto."""

    __slots__ = ()


class Deferred(NamedTuple):
    """Results of calls that may be in flight: the number of rows is known, but not the columns.

    Attributes:
        length: Number of rows.
        base: Rows whose references are all :class:`Promised`, or handles whose rows are concatenated.
        steps: Operations to apply after the calls end, as method names and arguments.
    """

    length: int
    base: RowMap | tuple[DataProtoFuture, ...]
    steps: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def then(self, name: str, *args: Any, length: int | None = None) -> Deferred:
        """Return a copy with one more operation."""
        return Deferred(self.length if length is None else length, self.base, (*self.steps, (name, args)))

    def take(self, pick: Pick) -> Deferred:
        """Return the picked rows, without moving data."""
        if isinstance(self.base, tuple) and len(self.base) > 1:
            return self.then("_take", pick, length=pick.rows)
        base = (self.base[0]._take(pick),) if isinstance(self.base, tuple) else self.base.take(pick)[0]
        steps = []
        for name, args in self.steps:
            picked = (args[0]._take(pick), *args[1:]) if name == "joined" else args
            steps.append((name, picked))
        return Deferred(pick.rows, base, tuple(steps))

    def settle(self, fetch: Fetch, timeout: float | None) -> DataProtoFuture:
        """Wait for the calls and return a handle with known columns.

        Raises:
            DataProtoError: a call did not return a DataProto, or returned a different number of rows than declared.
        """
        if isinstance(self.base, tuple):
            handle: DataProtoFuture = DataProtoFuture.concat([part.connected(fetch) for part in self.base])
        else:
            shards = _settled(self.base.pieces, fetch, timeout)
            parts = [
                DataProtoFuture.of_shard(shard, fetch).slice(piece.start, piece.stop)
                for shard, piece in zip(shards, self.base.pieces, strict=True)
            ]
            handle = DataProtoFuture.concat(parts)
            if self.base.index is not None:
                handle = handle._take(Pick(None, self.base.index, len(self.base.index)))
        for name, args in self.steps:
            bound = [arg.connected(fetch) if isinstance(arg, DataProtoFuture) else arg for arg in args]
            handle = getattr(handle, name)(*bound)
        return handle


def _settled(pieces: Sequence[Piece], fetch: Fetch, timeout: float | None) -> list[StoredShard]:
    """Return the shard description that each piece's call returned."""
    refs = {id(piece.ref): piece.ref for piece in pieces}
    found = dict(zip(refs, fetch([Cut(promised.ref) for promised in refs.values()], timeout), strict=True))
    for key, shard in found.items():
        if isinstance(shard, BaseException):  # a single-process runtime stores the exception in place of the result
            raise shard
        if not isinstance(shard, StoredShard) or shard.length != refs[key].rows:
            what = f"{shard.length} rows" if isinstance(shard, StoredShard) else f"a {type(shard).__name__}"
            raise DataProtoError(
                f"a method registered with rows='same' got {refs[key].rows} rows and returned {what}; return a row "
                "for each row, or register it without rows"
            )
    return [found[id(piece.ref)] for piece in pieces]


def promise(refs: Sequence[Any], rows: Sequence[int], taken: int | Sequence[int]) -> Deferred:
    """Describe the concatenated results of calls that may be in flight.

    Args:
        refs: References to the results.
        rows: Number of rows of each result.
        taken: Rows of the concatenated results to keep: a count from the start, or row numbers.
    """
    pieces = tuple(Piece(Promised(ref, count), 0, count) for ref, count in zip(refs, rows, strict=True))
    made = Deferred(sum(rows), RowMap.concat([RowMap((piece,)) for piece in pieces]))
    if isinstance(taken, int):
        return made if taken == made.length else made.take(pick_slice(slice(0, taken), made.length))
    return made.take(Pick(None, torch.tensor(taken, dtype=torch.int64), len(taken)))


def _unbound(cuts: Sequence[Cut], timeout: float | None) -> list[Any]:  # noqa: ARG001  # a Fetch
    raise DataProtoError("this handle is not connected to a store; bind(fetch) connects it")


class DataProtoFuture(Table[StoredColumn]):
    """A handle to the result of a non-blocking call, whose rows stay in the workers' store.

    A handle has the operations of a :class:`~rollcast.protocol.DataProto`, with the same meaning of names and lengths,
    but they move no data. A worker that receives a handle fetches the rows and columns that it needs directly from the
    workers that store them. ``handle["x"]`` fetches one column, :meth:`get` all columns.

    Reading keys or dtypes waits for the call to end. The length of the result is known at once if the method is
    registered with ``rows="same"``; such a handle can be split, reordered, joined and passed to another call while its
    own call is still running.

    Args:
        resolve: Function that waits for the call for at most the given seconds, and returns a StoredShard, a handle,
            or the call's result if that is not a DataProto.
        fetch: Function that returns rows of stored objects, requested as :class:`Cut`.
        ready: Function that returns True if ``resolve`` would not wait.
        cancel: Function that cancels the call and returns True if it had not ended.
        refs: The runtime's references to the call's results, one per rank.
        deferred: Description of the result before the call ends; None if its length is unknown.
        by_rank: Function that yields the rank and result of each rank as they end, waiting at most the given seconds
            in total.
    """

    def __init__(
        self,
        resolve: Resolve,
        fetch: Fetch = _unbound,
        ready: Callable[[], bool] | None = None,
        cancel: Callable[[], bool] | None = None,
        refs: Sequence[Any] = (),
        deferred: Deferred | None = None,
        by_rank: Callable[[float | None], Iterator[tuple[int, Any]]] | None = None,
    ) -> None:
        self._refs = tuple(refs)
        self._resolve = resolve
        self._fetch = fetch
        self._ready = ready
        self._cancel = cancel
        self._cancelled = False
        self._deferred = deferred
        self._by_rank = by_rank
        self._shard: StoredShard | None = None
        self._other: tuple[Any, ...] = ()
        self._whole: DataProto | None = None

    @classmethod
    def of_shard(cls, shard: StoredShard, fetch: Fetch = _unbound) -> Self:
        """Build a handle to a shard that a worker has stored."""
        made = cls(_known, fetch)
        made._shard = shard._replace(meta_info=copy_meta(shard.meta_info))
        return made

    @classmethod
    def of_batch(cls, data: DataProto) -> Self:
        """Wrap a batch as a handle; columns in this process are sent inline."""
        as_handle = getattr(data, "handle", None)
        if as_handle is not None:  # a LazyBatch, whose other columns stay on the workers
            return cast("Self", as_handle())
        return cls.of_shard(_described(data, _Inline(data)))

    @classmethod
    def of_deferred(cls, deferred: Deferred, fetch: Fetch = _unbound) -> Self:
        """Build a handle to results of calls that may be in flight."""
        return cls(lambda timeout: deferred.settle(fetch, timeout), fetch, deferred=deferred)

    def bind(self, fetch: Fetch) -> Self:
        """Return a copy of the handle that fetches rows with ``fetch``."""
        if self._pending:
            return self.of_deferred(self._known_part, fetch)
        return self if self.wait()._other else self.of_shard(self._content(), fetch)

    def connected(self, fetch: Fetch) -> Self:
        """Return this handle if it is connected to a store, else :meth:`bind` it."""
        return self.bind(fetch) if self._fetch is _unbound else self

    def __reduce__(self) -> tuple[Any, ...]:
        if self._pending and not self.done():
            return DataProtoFuture.of_deferred, (self._known_part,)
        if self.wait()._other:
            return _of_value, self._other
        length, columns, meta = self._content()
        return DataProtoFuture.of_shard, (StoredShard(length, _trimmed(columns), meta),)

    @property
    def refs(self) -> tuple[Any, ...]:
        """The runtime's references behind the handle, without duplicates.

        While the call is in flight, these are its results, one per rank, in rank order (``ray.wait(handle.refs)``).
        After :meth:`wait`, these are the stored batches that contain the rows; local rows have none.
        """
        if self._shard is None:
            return self._refs
        pieces = [piece for column in self._shard.columns.values() for piece in column.rows.pieces]
        return tuple({id(piece.ref): piece.ref for piece in pieces if not isinstance(piece.ref, _Inline)}.values())

    # ---- waiting ----

    @property
    def _pending(self) -> bool:
        """True while the length is known but the columns are not."""
        return self._deferred is not None and self._shard is None and not self._other

    @property
    def _known_part(self) -> Deferred:
        if self._deferred is None:
            raise DataProtoError("nothing is known of this handle before its call has ended")
        return self._deferred

    def wait(self, timeout: float | None = None) -> Self:
        """Wait until the call has ended, without fetching anything.

        Raises:
            WorkerError: the call failed or was cancelled.
            WorkerTimeoutError: ``timeout`` seconds passed; the call continues and can be awaited again.
        """
        if self._shard is None and not self._other:
            if self._cancelled:
                raise WorkerError("the call of this handle was cancelled, so it has no result")
            found = self._resolve(timeout)
            if isinstance(found, DataProtoFuture):
                found = found._content()
            if isinstance(found, StoredShard):
                self._check_declared(found.length)
                self._shard = found._replace(meta_info=copy_meta(found.meta_info))
            else:
                self._other = (found,)
        return self

    def _check_declared(self, rows: int) -> None:
        if self._deferred is not None and self._deferred.length != rows:
            raise DataProtoError(
                f"a method registered with rows='same' should return {self._deferred.length} rows and returned {rows}; "
                "return a row for each row, or register it without rows"
            )

    def cancel(self) -> bool:
        """Cancel the call on every rank; return True if it had not ended.

        A rank that has not started the call drops it; a rank that is running the call is interrupted, which poisons a
        group of several ranks: see :meth:`rollcast.WorkerGroup.restart`.
        """
        if self._cancelled or self._shard is not None or self._other or self._cancel is None:
            return False
        self._cancelled = self._cancel()
        return self._cancelled

    def done(self) -> bool:
        """Return True if :meth:`wait` would return at once."""
        ended = self._shard is not None or bool(self._other) or self._cancelled
        return ended or self._ready is None or self._ready()

    def get(self, timeout: float | None = None) -> Any:
        """Fetch and return the DataProto, or the call's other result; later calls return the same object.

        The tensors have their own memory: writing to them does not affect other readers of the rows.

        Raises:
            WorkerError: the call failed or was cancelled.
            WorkerTimeoutError: the deadline (seconds) passed; the call goes on, and can be awaited again.
        """
        self.wait(timeout)
        if self._other:
            return _fetched(self._other[0], timeout)
        if self._whole is None:
            self._whole = self.read(timeout).owned()
        return self._whole

    def read(self, timeout: float | None = None) -> Reading:
        """Fetch the rows without copying rows in shared memory.

        Raises:
            WorkerError: the call failed, or ``timeout`` seconds passed.
        """
        return _build(self.wait(timeout)._content(), self._fetch, timeout)

    def as_completed(self, timeout: float | None = None) -> Iterator[tuple[int, Any]]:
        """Yield ``(rank, result)`` in the order in which the ranks end; DataProtos are yielded as handles.

        Args:
            timeout: Deadline for all ranks in seconds; by default the deadline of the group.

        Raises:
            WorkerError: a rank failed, or the deadline passed.
            DataProtoError: the handle is not the direct result of one call, but a part or a combination of results.
        """
        if self._by_rank is None:
            raise DataProtoError("as_completed() works on the handle that a call returned, not on what was made of it")
        return self._by_rank(timeout)

    # ---- reading ----

    def __len__(self) -> int:
        return self._known_part.length if self._pending else self._content().length

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
            rows = f", rows={self._known_part.length}" if self._pending else ""
            return f"DataProtoFuture(in flight{rows})" if not self._other else f"DataProtoFuture({self._other[0]!r})"
        return f"DataProtoFuture(rows={self._shard.length}, columns={list(self._shard.columns)})"

    # ---- operations ----

    @property
    def _precedence(self) -> int:
        return 1 if self._fetch is _unbound else 2

    def _content(self) -> StoredShard:
        if self._shard is None:
            self.wait()
        if self._shard is None:
            raise DataProtoError(
                f"the call returned a {type(self._other[0]).__name__}, not a DataProto; take it with get()"
            )
        return self._shard

    def _like(self, length: int, columns: Mapping[str, StoredColumn], meta_info: dict[str, Any]) -> Self:
        return self.of_shard(StoredShard(length, columns, meta_info), self._fetch)

    def _later(self, deferred: Deferred, *others: DataProtoFuture) -> Self:
        """Build a handle to the result of an operation on this handle and others, some of whose calls are in flight."""
        members: tuple[DataProtoFuture, ...] = (self, *others)

        def resolve(timeout: float | None) -> DataProtoFuture:
            for member in members:
                member.wait(timeout)  # raises the error of a failed call with its name
            return deferred.settle(self._fetch, timeout)

        return type(self)(resolve, self._fetch, lambda: all(member.done() for member in members), deferred=deferred)

    def _accept(self, operation: str, other: object) -> DataProtoFuture:
        if isinstance(other, DataProtoFuture):
            return other
        if not isinstance(other, DataProto):
            raise DataProtoError(f"{operation}: a {type(other).__name__} is neither a DataProto nor a handle to one")
        return DataProtoFuture.of_batch(other)

    def select(self, keys: Any = None, meta_info_keys: Any = None) -> Self:
        """See :meth:`DataProto.select`; while the call runs, a missing column raises only when it is read."""
        if not self._pending:
            return super().select(keys, meta_info_keys)
        names = [keys] if isinstance(keys, str) else None if keys is None else list(keys)
        metas = None if meta_info_keys is None else list(meta_info_keys)
        return self._later(self._known_part.then("select", names, metas))

    def drop(self, keys: Any) -> Self:
        """See :meth:`DataProto.drop`."""
        if not self._pending:
            return super().drop(keys)
        return self._later(self._known_part.then("drop", [keys] if isinstance(keys, str) else list(keys)))

    def rename(self, mapping: Mapping[str, str]) -> Self:
        """See :meth:`DataProto.rename`."""
        return self._later(self._known_part.then("rename", dict(mapping))) if self._pending else super().rename(mapping)

    def joined(self, other: Any, overwrite: bool = False) -> Self:
        """See :meth:`DataProto.joined`; while the calls run, a conflict raises only when the rows are read."""
        added = self._accept("joined", other)
        if not (self._pending or added._pending):
            return super().joined(added, overwrite)
        if len(self) != len(added):
            raise DataProtoError(f"joined: {len(self)} rows here but {len(added)} in the other")
        lead = self if self._precedence >= added._precedence else added
        base = self._known_part if self._pending else Deferred(len(self), (self,))
        made = lead._later(base.then("joined", added, overwrite), self, added)
        return cast("Self", made)

    def _take(self, pick: Pick) -> Self:
        return self._later(self._known_part.take(pick)) if self._pending else super()._take(pick)

    def _spans(self, size: int) -> list[Self]:
        if not self._pending:
            return super()._spans(size)
        return [self._take(pick_slice(slice(at, at + size), len(self))) for at in range(0, max(len(self), 1), size)]

    @classmethod
    def concat(cls, members: Sequence[Any]) -> Any:
        """See :meth:`DataProto.concat`; does not wait for members whose length is known."""
        handles = [member for member in members if isinstance(member, DataProtoFuture)]
        if not any(handle._pending for handle in handles):
            return super().concat(members)
        lead = max(handles, key=lambda handle: handle._precedence)
        parts = tuple(lead._accept("concat", member) for member in members)
        return lead._later(Deferred(sum(map(len, parts)), parts), *parts)

    @staticmethod
    def _pick(columns: Mapping[str, StoredColumn], pick: Pick) -> dict[str, StoredColumn]:
        taken: dict[int, tuple[RowMap, slice | list[int]]] = {}
        found: dict[str, StoredColumn] = {}
        for name, column in columns.items():
            key = id(column.rows)
            if key not in taken:
                taken[key] = column.rows.take(pick)
            found[name] = column.over(*taken[key])
        return found

    @staticmethod
    def _clash(name: str, mine: StoredColumn, theirs: StoredColumn) -> str | None:
        if mine is theirs or mine == theirs:
            return None
        return f"column {name!r} is in both, and whether the values are equal cannot be told without moving them"

    @staticmethod
    def _concat(members: Sequence[Mapping[str, StoredColumn]]) -> dict[str, StoredColumn]:
        if len(members) == 1:
            return dict(members[0])
        made: dict[tuple[int, ...], RowMap] = {}
        joined: dict[str, StoredColumn] = {}
        for name in members[0]:
            parts = [member[name] for member in members]
            if len({part.dtype for part in parts}) > 1:
                dtypes = sorted({str(part.dtype) for part in parts})
                raise DataProtoError(f"concat: column {name!r} has the dtypes {dtypes}")
            key = tuple([id(part.rows) for part in parts])
            if key not in made:
                made[key] = RowMap.concat([part.rows for part in parts])
            joined[name] = StoredColumn(parts[0].dtype, _joined_source(parts), made[key])
        return joined

    def with_columns(self, mapping: Mapping[str, Any] | None = None, /, **columns: Any) -> Self:
        """Return a handle with local columns added or replaced; they are sent inline."""
        return self.joined(DataProto.from_single_dict({**(mapping or {}), **columns}), overwrite=True)


def _known(timeout: float | None) -> Any:  # noqa: ARG001  # a Resolve
    raise DataProtoError("a handle with known rows has nothing to wait for")


def _joined_source(parts: Sequence[StoredColumn]) -> str | tuple[str, ...]:
    """Return the source of concatenated columns, for the pieces that :meth:`RowMap.concat` keeps."""
    first = parts[0].source
    if isinstance(first, str) and all(part.source == first for part in parts):
        return first
    all_kept = any(part.rows.index is not None for part in parts)
    named = [pair for part in parts for pair in zip(part.rows.pieces, part.sources(), strict=True)]
    kept = tuple(source for piece, source in named if all_kept or piece.stop > piece.start)
    return kept or parts[0].sources()[:1]


def _trimmed(columns: Mapping[str, StoredColumn]) -> dict[str, StoredColumn]:
    """Reduce local batches to the rows and columns in use, before sending."""
    by_rows: dict[int, list[str]] = {}
    for name, column in columns.items():
        by_rows.setdefault(id(column.rows), []).append(name)
    sent = dict(columns)
    for names in by_rows.values():
        rows = columns[names[0]].rows
        if not any(isinstance(piece.ref, _Inline) for piece in rows.pieces):
            continue
        sources = [columns[name].sources() for name in names]
        pieces = []
        for number, piece in enumerate(rows.pieces):
            if not isinstance(piece.ref, _Inline):
                pieces.append(piece)
                continue
            wanted = list(dict.fromkeys(source[number] for source in sources))
            cut = piece.ref.value.select(wanted, []).slice(piece.start, piece.stop)
            pieces.append(Piece(_Inline(cut), 0, piece.stop - piece.start))
        trimmed = RowMap(tuple(pieces), rows.index)
        sent |= {name: columns[name]._replace(rows=trimmed) for name in names}
    return sent


def _of_value(value: Any) -> DataProtoFuture:
    return DataProtoFuture(lambda _: value).wait()


def _fetched(value: Any, timeout: float | None) -> Any:
    """Replace handles in a list or tuple, which a dispatch mode may collect from the ranks, by their batches."""
    if isinstance(value, list | tuple):
        return type(value)(each.get(timeout) if isinstance(each, DataProtoFuture) else each for each in value)
    return value


def _described(data: DataProto, ref: Any) -> StoredShard:
    rows = RowMap((Piece(ref, 0, len(data)),))
    dtypes = data.dtypes()
    return StoredShard(len(data), {name: StoredColumn(dtypes[name], name, rows) for name in dtypes}, data.meta_info)


def store_batch(data: DataProto, put: Callable[[Any], Any]) -> StoredShard:
    """Store a batch as one object, without its meta dict, and return its description.

    Args:
        put: Function that stores a :class:`Kept` batch and returns a reference to it.
    """
    if not data.keys():
        return StoredShard(len(data), {}, data.meta_info)
    return _described(data, put(Kept(data.select(None, []))))


class Reading(NamedTuple):
    """Fetched rows.

    Attributes:
        batch: The rows.
        shared: Names of columns whose memory is shared with other readers.
        kept: Stored objects that contain the shared columns.
    """

    batch: DataProto
    shared: frozenset[str]
    kept: tuple[Kept, ...] = ()

    def owned(self) -> DataProto:
        """Return the batch with its own memory."""
        if not self.shared:
            return self.batch
        length, columns, meta = self.batch._content()
        own = {name: column for name, column in columns.items() if name in self.shared}
        return type(self.batch)._of(length, {**columns, **ops.map_tensors(own, torch.clone)}, meta)


class _Plan(NamedTuple):
    """A plan to build the columns of one :class:`RowMap`: indices of reads, and the order of the rows read."""

    names: list[str]
    reads: list[tuple[int, tuple[str, ...]]]
    order: torch.Tensor | None


def _plan(columns: Mapping[str, StoredColumn]) -> tuple[list[_Plan], list[Cut]]:
    """Plan the reads of the columns; the rows of an object are read once for all columns."""
    groups: dict[int, list[str]] = {}
    for name, column in columns.items():
        groups.setdefault(id(column.rows), []).append(name)
    wanted: dict[tuple[Any, ...], tuple[int, Piece, torch.Tensor | None, dict[str, None]]] = {}
    plans: list[_Plan] = []
    for names in groups.values():
        rows = columns[names[0]].rows
        sources = [columns[name].sources() for name in names]
        found, order = rows.reads()
        reads = []
        for number, piece, index in found:
            keys = tuple(source[number] for source in sources)
            key = (id(piece.ref), piece.start, piece.stop, None if index is None else index.numpy().tobytes())
            entry = wanted.setdefault(key, (len(wanted), piece, index, {}))
            entry[3].update(dict.fromkeys(keys))
            reads.append((entry[0], keys))
        plans.append(_Plan(names, reads, order))
    cuts = [Cut(p.ref, tuple(keys), p.start, p.stop, index) for _, p, index, keys in wanted.values()]
    return plans, cuts


def _read_cuts(cuts: Sequence[Cut], fetch: Fetch, timeout: float | None) -> list[Any]:
    """Read each cut; local batches are cut in this process."""
    stored = [cut for cut in cuts if not isinstance(cut.ref, _Inline)]
    arrived = iter(fetch(stored, timeout) if stored else ())
    return [cut.of(cut.ref.value) if isinstance(cut.ref, _Inline) else next(arrived) for cut in cuts]


def _build(shard: StoredShard, fetch: Fetch, timeout: float | None) -> Reading:
    """Fetch the rows of a shard and concatenate them.

    Raises:
        DataProtoError: joined pieces differ in dtype or row shape.
    """
    length, columns, meta = shard
    plans, cuts = _plan(columns)
    kept: list[Kept] = []
    batches: list[DataProto] = []
    for found in _read_cuts(cuts, fetch, timeout):
        if isinstance(found, Kept):
            kept.append(found)
        batch = found.batch if isinstance(found, Kept) else found
        if not isinstance(batch, DataProto):
            raise DataProtoError(f"the store returned a {type(batch).__name__} where a DataProto was put")
        batches.append(batch)
    built: dict[str, torch.Tensor] = {}
    shared: set[str] = set()
    for names, reads, order in plans:
        parts = []
        for number, keys in reads:
            source = batches[number]._columns()
            found = {name: source[key] for name, key in zip(names, keys, strict=True)}
            parts.append(DataProto._of(len(batches[number]), found, None))
        joined = parts[0] if len(parts) == 1 else DataProto.concat(parts)
        built |= (joined if order is None else joined.select_idxs(order))._columns()
        if len(parts) == 1 and order is None and cuts[reads[0][0]].picked is None:
            shared.update(names)
    ordered = {name: built[name] for name in columns}
    ops.common_length(ordered, length)
    batch = _common_class(batches)._of(length, ordered, meta)
    return Reading(batch, frozenset(shared), tuple(kept) if shared else ())


def _common_class(batches: Iterable[DataProto]) -> type[DataProto]:
    """Return the class of the batches: the most derived one if the others are its bases, else DataProto."""
    kinds = {type(batch) for batch in batches}
    return next((kind for kind in kinds if all(issubclass(kind, other) for other in kinds)), DataProto)
