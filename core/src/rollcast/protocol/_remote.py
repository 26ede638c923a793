"""Remote columns: rows of stored objects, read when they are looked at and sent as references.

A worker stores a batch as one object. A remote column names the column of such objects, and the rows of them. Columns
with the same rows share one :class:`RowMap`, so that the time of selecting rows depends on the number of objects, not
of columns. The object may also be the result of a call in flight: its rows are known, its columns when it has ended.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from pickle import PickleBuffer
from typing import Any, NamedTuple, Protocol

import torch

from rollcast.errors import DataProtoError
from rollcast.protocol import _columns as ops
from rollcast.protocol import _jagged as jagged
from rollcast.protocol import _wire as wire
from rollcast.protocol._rows import Pick, pick_index, pick_slice

__all__ = ["ALL", "Call", "Column", "Cut", "Fetch", "Promised", "Reading", "Remote", "RowMap", "StoredBatch"]

#: Source of the column that stands for all columns of a call in flight; no column can have this name.
ALL = ""
#: Name of a column in stored objects, or its name in each of them.
Source = str | tuple[str, ...]
#: Size in bytes of the damage mark that is stored with each batch.
_MARK_BYTES = 512


class StoredBatch:
    """The columns of a batch in a store, with a mark that a process sets if it has damaged them.

    Readers on one node share the memory of the columns and the mark, so all of them see the mark.

    Args:
        length: Number of rows.
        columns: Columns of these rows.
        mark: Text of the mark, uint8 ``[512]``; zeros if not set.
    """

    __slots__ = ("_mark", "columns", "length")

    def __init__(self, length: int, columns: Mapping[str, torch.Tensor], mark: torch.Tensor | None = None) -> None:
        self.length = length
        self.columns = columns
        self._mark = torch.zeros(_MARK_BYTES, dtype=torch.uint8) if mark is None else mark

    @property
    def nbytes(self) -> int:
        """Size of the rows in bytes."""
        return sum(map(ops.column_nbytes, self.columns.values()))

    def damage(self, why: str) -> None:
        """Set the mark; from now on, reading the batch raises an error with the text ``why``."""
        text = why.encode()[:_MARK_BYTES]
        self._mark[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def check(self) -> None:
        """Raise ``DataProtoError`` if the mark is set."""
        if int(self._mark[0]):
            text = bytes(self._mark.tolist()).rstrip(b"\0").decode(errors="replace")
            raise DataProtoError(f"these rows were damaged and cannot be read: {text}")

    def cut(self, names: Iterable[str], pick: Pick) -> StoredBatch:
        """Return columns of the picked rows, as views if the rows are consecutive; the mark is the same."""
        self.check()
        whole = pick.span == slice(0, self.length, 1)
        columns = {name: self.columns[name] if whole else ops.take(self.columns[name], pick) for name in names}
        return StoredBatch(pick.rows, columns, self._mark)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        header, buffers = wire.pack(self.length, {**self.columns, ALL: self._mark}, {})
        return _unpack_stored, (header, to_send(buffers, protocol))


def _unpack_stored(header: wire.Header, buffers: list[Any]) -> StoredBatch:
    columns = wire.unpack(header, buffers)
    return StoredBatch(header.length, columns, columns.pop(ALL))


def to_send(buffers: Sequence[torch.Tensor], protocol: int) -> list[Any]:
    """Return the buffers of a serialized batch as pickle sends them: out of band if the protocol can."""
    arrays = [buffer.numpy() for buffer in buffers]
    return [PickleBuffer(array.data) if protocol >= 5 else array.tobytes() for array in arrays]


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
        """Return these rows and columns of the stored object.

        Raises:
            DataProtoError: the object is not a batch, or has been damaged.
        """
        if self.columns is None:
            return stored
        if not isinstance(stored, StoredBatch):
            raise DataProtoError(f"the store returned a {type(stored).__name__} where a DataProto was put")
        if self.picked is not None:
            return stored.cut(self.columns, Pick(None, self.picked, len(self.picked)))
        return stored.cut(self.columns, Pick(slice(self.start, self.stop, 1), None, self.stop - self.start))


Fetch = Callable[[Sequence[Cut], "float | None"], list[Any]]


class Description(Protocol):
    """A batch that a worker has stored: all of its columns are remote."""

    meta_info: dict[str, Any]

    def __len__(self) -> int: ...

    def remote_columns(self) -> Mapping[str, Remote]:
        """Return the columns."""


class Call(Protocol):
    """A call in flight."""

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the call and raise its error."""

    def done(self) -> bool:
        """Return True if :meth:`wait` would return at once."""


class Promised:
    """A reference to the result of a call that may be in flight: a :class:`Description` of ``rows`` rows."""

    __slots__ = ("description", "ref", "rows")

    def __init__(self, ref: Any, rows: int) -> None:
        self.ref = ref
        self.rows = rows
        self.description: Description | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Promised, (self.ref, self.rows)

    def settle(self, result: Any) -> None:
        """Take the result of the call.

        Raises:
            DataProtoError: the call did not return a batch of the promised number of rows.
        """
        if isinstance(result, BaseException):  # a single-process runtime stores the exception in place of the result
            raise result
        is_batch = hasattr(result, "remote_columns")
        if not is_batch or len(result) != self.rows:
            what = len(result) if is_batch else f"a {type(result).__name__}"
            raise DataProtoError(
                f"a method registered with rows='same' should return {self.rows} rows and returned {what}; return a "
                "row for each row, or register it without rows"
            )
        self.description = result


class _Inline(NamedTuple):
    """Local columns in place of a stored object; sent with the batch."""

    stored: StoredBatch


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
        fetch: Function that returns rows of stored objects; None until the map is bound to a store.
        calls: Calls in flight whose results the pieces are; not sent to other processes.
        origin: Map from which the rows were picked, and the pick; columns read of it are not read again.
    """

    __slots__ = ("_ends", "_values", "calls", "fetch", "index", "origin", "pieces")

    def __init__(
        self,
        pieces: tuple[Piece, ...],
        index: torch.Tensor | None = None,
        fetch: Fetch | None = None,
        calls: tuple[Call, ...] = (),
        origin: tuple[RowMap, Pick] | None = None,
    ) -> None:
        self.pieces = pieces
        self.index = index
        self.fetch = fetch
        self.calls = calls
        self.origin = origin
        self._ends: tuple[list[int], torch.Tensor] | None = None
        self._values: dict[Source, torch.Tensor] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return RowMap, (self.pieces, self.index)

    def __len__(self) -> int:
        return self.ends[0][-1] if self.index is None else len(self.index)

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

    @property
    def is_promised(self) -> bool:
        """True if a piece is the result of a call, which has to be awaited before it is read."""
        return any(isinstance(piece.ref, Promised) for piece in self.pieces)

    def bound(self, fetch: Fetch) -> RowMap:
        """Return the rows, read with ``fetch``."""
        return RowMap(self.pieces, self.index, fetch)

    @property
    def is_known(self) -> bool:
        """True if this process has the descriptions of all results."""
        return not any(isinstance(piece.ref, Promised) and piece.ref.description is None for piece in self.pieces)

    def take_results(self, refs: Sequence[Any], results: Sequence[Any]) -> None:
        """Take the results of calls that have ended, by their references, so that they are not fetched again.

        Raises:
            DataProtoError: a call did not return the promised number of rows.
        """
        by_ref = dict(zip(map(id, refs), results, strict=True))
        for piece in self.pieces:
            if isinstance(piece.ref, Promised):
                piece.ref.settle(by_ref[id(piece.ref.ref)])

    # ---- columns that were read ----

    def value(self, source: Source) -> torch.Tensor | None:
        """Return a column if it was read, or is read of the map from which the rows were picked; else None."""
        if source not in self._values and self.origin is not None:
            rows, pick = self.origin
            whole = rows.value(source)
            if whole is not None:
                self._values[source] = ops.take(whole, pick)
        return self._values.get(source)

    def remember(self, source: Source, value: torch.Tensor) -> torch.Tensor:
        """Keep a column that was read, and return it.

        If another column has equal offsets, the column shares them, because torch can combine two jagged tensors only
        if they share offsets.
        """
        for other in self._values.values():
            if not (jagged.is_jagged(value) and jagged.is_jagged(other)):
                continue
            offsets = jagged.offsets_of(other)
            if torch.equal(offsets, jagged.offsets_of(value)):
                value = jagged.build(jagged.values_of(value), offsets)
                break
        self._values[source] = value
        return value

    # ---- selecting rows ----

    def take(self, pick: Pick) -> tuple[RowMap, slice | list[int]]:
        """Return the picked rows and the indices of the pieces that contain them, without moving data."""
        pieces, index, rows = self._taken(pick)
        return RowMap(pieces, index, self.fetch, self.calls, (self, pick)), rows

    def _taken(self, pick: Pick) -> tuple[tuple[Piece, ...], torch.Tensor | None, slice | list[int]]:
        if self.index is not None:
            return self._indexed(self.index[pick.as_index()])
        span = pick.span
        if span is None or span.step != 1:
            return self._indexed(pick.as_index())
        if span.start >= span.stop:
            # An empty column keeps one piece for its row shape and dtype.
            return tuple(Piece(p.ref, p.start, p.start) for p in self.pieces[:1]), None, slice(0, 1)
        ends = self.ends[0]
        first, last = bisect_right(ends, span.start), bisect_left(ends, span.stop)
        pieces = list(self.pieces[first : last + 1])
        ref, start, stop = pieces[-1]
        pieces[-1] = Piece(ref, start, stop - (ends[last] - span.stop))
        ref, start, stop = pieces[0]
        pieces[0] = Piece(ref, start + span.start - (ends[first - 1] if first else 0), stop)
        return tuple(pieces), None, slice(first, last + 1)

    def _indexed(self, index: torch.Tensor) -> tuple[tuple[Piece, ...], torch.Tensor, slice | list[int]]:
        """Return the rows at ``index`` of the concatenated pieces, dropping pieces without such rows."""
        if len(self.pieces) < 2:
            return self.pieces, index, slice(None)
        if not len(index):
            return self.pieces[:1], index, slice(0, 1)
        ends = self.ends[1]
        used, position = _unique(torch.searchsorted(ends, index, right=True))
        if len(used) == len(self.pieces):
            return self.pieces, index, slice(None)
        numbers = used.tolist()
        pieces = tuple(self.pieces[number] for number in numbers)
        sizes = torch.tensor([piece.stop - piece.start for piece in pieces])
        removed_before = (ends[used] - sizes) - (sizes.cumsum(0) - sizes)
        return pieces, index - removed_before[position], numbers

    @staticmethod
    def concat(maps: Sequence[RowMap]) -> RowMap:
        """Concatenate the rows of all maps; drop pieces without rows, but keep at least one piece."""
        fetch = next((rows.fetch for rows in maps if rows.fetch is not None), None)
        calls = tuple({id(call): call for rows in maps for call in rows.calls}.values())
        if all(rows.index is None for rows in maps):
            pieces = [piece for rows in maps for piece in rows.pieces if piece.stop > piece.start]
            return RowMap(tuple(pieces) or maps[0].pieces[:1], None, fetch, calls)
        offset, parts = 0, []
        for rows in maps:
            length = rows.ends[0][-1]
            parts.append((torch.arange(length) if rows.index is None else rows.index) + offset)
            offset += length
        return RowMap(tuple(piece for rows in maps for piece in rows.pieces), torch.cat(parts), fetch, calls)

    def reads(self) -> tuple[list[tuple[int, Piece, torch.Tensor | None]], torch.Tensor | None]:
        """Return the reads that fetch the rows, and the order of the rows that they return.

        A read is the position, the rows and the index (or None) of a piece. Each row is read once, however often it is
        picked. The order is None if the rows are read in the requested order.
        """
        if self.index is None:
            return [(number, piece, None) for number, piece in enumerate(self.pieces)], None
        rows, order = _unique(self.index)
        bounds = torch.searchsorted(rows, self.ends[1]).tolist()
        reads: list[tuple[int, Piece, torch.Tensor | None]] = []
        before, begin = 0, 0
        for number, (piece, bound, end) in enumerate(zip(self.pieces, bounds, self.ends[0], strict=True)):
            if bound > before or len(self.pieces) == 1:
                local = rows[before:bound] + (piece.start - begin)
                reads.append((number, *_as_range(piece.ref, local)))
            before, begin = bound, end
        in_order = len(rows) == len(self.index) and bool((order == torch.arange(len(order))).all())
        return reads, None if in_order else order


def _as_range(ref: Any, rows: torch.Tensor) -> tuple[Piece, torch.Tensor | None]:
    """Return ascending rows of an object as a piece, with an index only if the rows are not consecutive."""
    count = len(rows)
    if not count:
        return Piece(ref, 0, 0), None
    first, last = int(rows[0]), int(rows[-1])
    return Piece(ref, first, last + 1), None if last - first + 1 == count else rows


class Remote(NamedTuple):
    """A remote column.

    Attributes:
        rows: Rows of the column, shared with other columns.
        source: Name of the column in the stored objects; a tuple of names, one per piece of ``rows``, if they differ.
        dtype: dtype of the column; ``object`` for an object column, None while its call is in flight.
    """

    rows: RowMap
    source: Source
    dtype: torch.dtype | type[object] | None = None

    @property
    def value(self) -> torch.Tensor | None:
        """The column if this process has read it, else None."""
        return self.rows.value(self.source)

    def sources(self) -> tuple[str, ...]:
        """Return the column's name in each piece."""
        return (self.source,) * len(self.rows.pieces) if isinstance(self.source, str) else self.source

    def over(self, rows: RowMap, pick: slice | list[int]) -> Remote:
        """Return the column for rows that contain only these pieces."""
        source = self.source
        if not isinstance(source, str):
            source = source[pick] if isinstance(pick, slice) else tuple(source[number] for number in pick)
        return Remote(rows, source, self.dtype)


Column = torch.Tensor | Remote


def describe(length: int, columns: Mapping[str, torch.Tensor], ref: Any) -> dict[str, Remote]:
    """Return the columns of a stored batch."""
    rows = RowMap((Piece(ref, 0, length),))
    return {
        name: Remote(rows, name, object if ops.kind_of(column) == "object" else column.dtype)
        for name, column in columns.items()
    }


def promise(refs: Sequence[Any], rows: Sequence[int], chosen: int | Sequence[int], fetch: Fetch) -> RowMap:
    """Return the concatenated rows of the results of calls that may be in flight.

    Args:
        refs: References to the results.
        rows: Number of rows of each result.
        chosen: Rows of the concatenated results to keep: a count from the start, or row numbers.
        fetch: Function that returns results and stored rows.
    """
    pieces = tuple(Piece(Promised(ref, count), 0, count) for ref, count in zip(refs, rows, strict=True))
    whole = RowMap.concat([RowMap((piece,), None, fetch) for piece in pieces])
    if isinstance(chosen, int):
        return whole if chosen == len(whole) else whole.take(pick_slice(slice(0, chosen), len(whole)))[0]
    return whole.take(pick_index(chosen, len(whole)))[0]


# ---- operations ----


def take(columns: Mapping[str, Column], pick: Pick) -> dict[str, Column]:
    """Return the picked rows of columns of any kind; columns with the same rows keep sharing them."""
    pieces: dict[int, tuple[RowMap, slice | list[int]]] = {}
    picked: dict[str, Column] = {}
    for name, column in columns.items():
        if not isinstance(column, Remote):
            picked[name] = ops.take(column, pick)
            continue
        key = id(column.rows)
        if key not in pieces:
            pieces[key] = column.rows.take(pick)
        picked[name] = column.over(*pieces[key])
    return picked


def concat(members: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    """Concatenate the rows of members with the same columns; a local column joins a remote one inline.

    Raises:
        DataProtoError: a local column differs between members in kind, dtype, row shape or device, or a remote one in
            dtype; other differences of remote columns are found when they are read.
    """
    if len(members) == 1:
        return dict(members[0])
    maps: dict[tuple[int, ...], tuple[RowMap, list[Remote]]] = {}
    local: list[ops.Columns] = [{} for _ in members]
    joined: dict[str, Column] = {}
    for name in members[0]:
        parts = [member[name] for member in members]
        tensors = [part for part in parts if not isinstance(part, Remote)]
        if len(tensors) == len(parts):
            for columns, tensor in zip(local, tensors, strict=True):
                columns[name] = tensor
            continue
        remotes = [part if isinstance(part, Remote) else _inline(name, part) for part in parts]
        if len(dtypes := {part.dtype for part in remotes if part.dtype is not None}) > 1:
            raise DataProtoError(f"concat: column {name!r} has the dtypes {sorted(map(str, dtypes))}")
        key = tuple(id(part.rows) for part in remotes)
        if key not in maps:
            # Parts are kept, so that no other map gets the id of one of theirs.
            maps[key] = RowMap.concat([part.rows for part in remotes]), remotes
        joined[name] = Remote(maps[key][0], _joined_source(remotes), next(iter(dtypes), None))
    here = ops.concat_columns(local)
    return {name: here[name] if name in here else joined[name] for name in members[0]}


def _inline(name: str, column: torch.Tensor) -> Remote:
    length = int(column.shape[0])
    return describe(length, {name: column}, _Inline(StoredBatch(length, {name: column})))[name]


def _joined_source(parts: Sequence[Remote]) -> Source:
    """Return the source of concatenated columns, for the pieces that :meth:`RowMap.concat` keeps."""
    first = parts[0].source
    if isinstance(first, str) and all(part.source == first for part in parts):
        return first
    all_kept = any(part.rows.index is not None for part in parts)
    named = [pair for part in parts for pair in zip(part.rows.pieces, part.sources(), strict=True)]
    sources = tuple(source for piece, source in named if all_kept or piece.stop > piece.start)
    return sources or parts[0].sources()[:1]


def bind(columns: Mapping[str, Column], fetch: Fetch) -> dict[str, Column]:
    """Return the columns, whose remote ones are read with ``fetch``."""
    maps: dict[int, RowMap] = {}
    bound: dict[str, Column] = {}
    for name, column in columns.items():
        if not isinstance(column, Remote):
            bound[name] = column
            continue
        if id(column.rows) not in maps:
            maps[id(column.rows)] = column.rows.bound(fetch)
        bound[name] = column._replace(rows=maps[id(column.rows)])
    return bound


def _by_rows(columns: Mapping[str, Remote]) -> list[list[str]]:
    """Return the names of the columns that share their rows, together."""
    names: dict[int, list[str]] = {}
    for name, column in columns.items():
        names.setdefault(id(column.rows), []).append(name)
    return list(names.values())


def trimmed(columns: Mapping[str, Remote]) -> dict[str, Remote]:
    """Reduce inline pieces to the rows and columns in use, before sending."""
    sent = dict(columns)
    for names in _by_rows(columns):
        rows = columns[names[0]].rows
        if not any(isinstance(piece.ref, _Inline) for piece in rows.pieces):
            continue
        sources = [columns[name].sources() for name in names]
        pieces = []
        for number, piece in enumerate(rows.pieces):
            if not isinstance(piece.ref, _Inline):
                pieces.append(piece)
                continue
            used = tuple(dict.fromkeys(source[number] for source in sources))
            stored = Cut(None, used, piece.start, piece.stop).of(piece.ref.stored)
            pieces.append(Piece(_Inline(stored), 0, piece.stop - piece.start))
        smaller = RowMap(tuple(pieces), rows.index)
        sent |= {name: columns[name]._replace(rows=smaller) for name in names}
    return sent


# ---- waiting ----


def await_calls(maps: Iterable[RowMap], timeout: float | None = None) -> None:
    """Wait for the calls in flight and take the descriptions of their results.

    Raises:
        WorkerError: a call failed, or ``timeout`` seconds passed.
        DataProtoError: a call did not return the promised rows.
    """
    missing: dict[int, tuple[Promised, Fetch]] = {}
    for rows in maps:
        for call in rows.calls:
            call.wait(timeout)  # raises the error of a failed call with its name
        for piece in rows.pieces:
            if isinstance(piece.ref, Promised) and piece.ref.description is None:
                missing[id(piece.ref)] = (piece.ref, rows.fetch or _unbound)
    for fetch, promised in _by_fetch(missing.values()):
        for ref, result in zip(promised, fetch([Cut(ref.ref) for ref in promised], timeout), strict=True):
            ref.settle(result)


def _by_fetch(items: Iterable[tuple[Any, Fetch]]) -> list[tuple[Fetch, list[Any]]]:
    grouped: list[tuple[Fetch, list[Any]]] = []
    for item, fetch in items:
        members = next((members for other, members in grouped if other == fetch), None)
        if members is None:
            grouped.append((fetch, [item]))
        else:
            members.append(item)
    return grouped


def _unbound(cuts: Sequence[Cut], timeout: float | None) -> list[Any]:  # noqa: ARG001  # a Fetch
    raise DataProtoError("these columns are not connected to a store: their batch was not an argument of a call")


def settle(columns: Mapping[str, Remote], timeout: float | None = None) -> dict[str, Remote]:
    """Wait for calls in flight, and return the columns over the objects that they stored.

    Raises:
        WorkerError: a call failed, or ``timeout`` seconds passed.
        ColumnError: a result lacks a column.
    """
    promised = {name: column for name, column in columns.items() if column.rows.is_promised}
    await_calls({id(column.rows): column.rows for column in promised.values()}.values(), timeout)
    cut: dict[tuple[int, int, int], tuple[RowMap, slice | list[int]]] = {}
    own: dict[tuple[int, int, int], RowMap] = {}
    joined: dict[tuple[int, ...], RowMap] = {}
    picked: dict[tuple[int, int], tuple[RowMap, slice | list[int]]] = {}

    def resolve(piece: Piece, source: str, fetch: Fetch | None) -> Remote:
        if not isinstance(piece.ref, Promised):
            key = (id(piece.ref), piece.start, piece.stop)
            return Remote(own.setdefault(key, RowMap((piece,), None, fetch)), source)
        there = piece.ref.description.remote_columns() if piece.ref.description is not None else {}
        if source not in there:
            raise ops.missing(source, there)
        column = there[source]
        key = (id(column.rows), piece.start, piece.stop)
        if key not in cut:
            rows = column.rows.bound(fetch) if fetch is not None else column.rows
            cut[key] = rows.take(pick_slice(slice(piece.start, piece.stop), len(rows)))
        return column.over(*cut[key])

    settled = dict(columns)
    for name, column in promised.items():
        rows = column.rows
        parts = [resolve(*pair, rows.fetch) for pair in zip(rows.pieces, column.sources(), strict=True)]
        parts = [part for part in parts if len(part.rows)] or parts[:1]
        key = tuple(id(part.rows) for part in parts)
        if key not in joined:
            joined[key] = RowMap.concat([part.rows for part in parts])
        dtype = next((part.dtype for part in parts if part.dtype is not None), None)
        whole = Remote(joined[key], _joined_source(parts), dtype)
        if rows.index is not None:
            pick = Pick(None, rows.index, len(rows.index))
            order = (id(whole.rows), id(rows.index))
            if order not in picked:
                picked[order] = whole.rows.take(pick)
            whole = whole.over(*picked[order])
        settled[name] = whole
    return settled


def settle_known(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Return the columns, with those of awaited calls over the objects that the calls stored."""
    remotes = {name: column for name, column in columns.items() if isinstance(column, Remote)}
    return {**columns, **settle({name: column for name, column in remotes.items() if column.rows.is_known})}


# ---- reading ----


class Reading(NamedTuple):
    """Columns that were read.

    Attributes:
        columns: The columns.
        shared: Names of columns whose memory is shared with other readers.
        stored: Stored objects that contain the shared columns.
    """

    columns: ops.Columns
    shared: frozenset[str]
    stored: tuple[StoredBatch, ...] = ()

    def owned(self) -> ops.Columns:
        """Return the columns with their own memory."""
        own = {name: column for name, column in self.columns.items() if name in self.shared}
        return {**self.columns, **ops.map_tensors(own, torch.clone)}


class _Plan(NamedTuple):
    """A plan to build the columns of one :class:`RowMap`: indices of reads, and the order of the rows read."""

    names: list[str]
    reads: list[tuple[int, tuple[str, ...]]]
    order: torch.Tensor | None


def _plan(columns: Mapping[str, Remote]) -> tuple[list[_Plan], list[tuple[Cut, Fetch]]]:
    """Plan the reads of the columns; the rows of an object are read once for all columns."""
    wanted: dict[tuple[Any, ...], tuple[int, Piece, torch.Tensor | None, dict[str, None], Fetch]] = {}
    plans: list[_Plan] = []
    for names in _by_rows(columns):
        rows = columns[names[0]].rows
        sources = [columns[name].sources() for name in names]
        pieces, order = rows.reads()
        reads = []
        for number, piece, index in pieces:
            keys = tuple(source[number] for source in sources)
            key = (id(piece.ref), piece.start, piece.stop, None if index is None else index.numpy().tobytes())
            entry = wanted.setdefault(key, (len(wanted), piece, index, {}, rows.fetch or _unbound))
            entry[3].update(dict.fromkeys(keys))
            reads.append((entry[0], keys))
        plans.append(_Plan(names, reads, order))
    cuts = [(Cut(p.ref, tuple(keys), p.start, p.stop, index), fetch) for _, p, index, keys, fetch in wanted.values()]
    return plans, cuts


def _read_cuts(cuts: Sequence[tuple[Cut, Fetch]], timeout: float | None) -> list[StoredBatch]:
    """Read each cut; inline pieces are cut in this process."""
    arrived: dict[int, Any] = {
        number: cut.of(cut.ref.stored) for number, (cut, _) in enumerate(cuts) if isinstance(cut.ref, _Inline)
    }
    away = [(number, fetch) for number, (_, fetch) in enumerate(cuts) if number not in arrived]
    for fetch, numbers in _by_fetch(away):
        arrived |= zip(numbers, fetch([cuts[number][0] for number in numbers], timeout), strict=True)
    for value in arrived.values():
        if not isinstance(value, StoredBatch):
            raise DataProtoError(f"the store returned a {type(value).__name__} where a DataProto was put")
    return [arrived[number] for number in range(len(cuts))]


def read(columns: Mapping[str, Remote], timeout: float | None = None) -> Reading:
    """Fetch columns together, waiting for calls in flight; rows in shared memory are not copied.

    Raises:
        WorkerError: a call failed, or ``timeout`` seconds passed.
        DataProtoError: joined pieces differ in dtype or row shape.
    """
    plans, cuts = _plan(settle(columns, timeout))
    stored = _read_cuts(cuts, timeout)
    built: dict[str, torch.Tensor] = {}
    shared: set[str] = set()
    for names, reads, order in plans:
        parts = [
            {name: stored[number].columns[key] for name, key in zip(names, keys, strict=True)} for number, keys in reads
        ]
        whole = parts[0] if len(parts) == 1 else ops.concat_columns(parts)
        if order is not None:
            pick = Pick(None, order, len(order))
            whole = {name: ops.take(column, pick) for name, column in whole.items()}
        built |= whole
        if len(parts) == 1 and order is None and cuts[reads[0][0]][0].picked is None:
            shared.update(names)
    return Reading({name: built[name] for name in columns}, frozenset(shared), tuple(stored) if shared else ())
