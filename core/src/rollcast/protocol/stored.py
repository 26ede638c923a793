"""Columns that stay in a runtime's store: which rows of which stored batch they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from rollcast.errors import DataProtoError
from rollcast.protocol import columns as ops
from rollcast.protocol import jagged
from rollcast.protocol.dataproto import DataProto
from rollcast.protocol.rows import Pick

__all__ = ["Inline", "Piece", "StoredColumn", "StoredShard", "build_columns", "store_batch"]

Fetch = Callable[[Sequence[Any], "float | None"], list[Any]]
Dtype = torch.dtype | type[object]


class Inline(NamedTuple):
    """A stored batch that is at hand; it travels with the handle."""

    value: DataProto


class Piece(NamedTuple):
    """Rows ``start`` to ``stop`` of column ``key`` of the DataProto that ``ref`` stands for."""

    ref: Any
    key: str
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """How many rows these are."""
        return self.stop - self.start


@dataclass(frozen=True)
class StoredColumn:
    """One column of a handle.

    Attributes:
        dtype: ``object`` for an object column.
        pieces: in order; together they are the column, unless there is an ``index``.
        index: int64 ``[rows]`` into the joined pieces.
    """

    dtype: Dtype
    pieces: tuple[Piece, ...]
    index: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        """Rows of the column."""
        return sum(piece.rows for piece in self.pieces) if self.index is None else len(self.index)

    def take(self, pick: Pick) -> StoredColumn:
        """The chosen rows; nothing moves."""
        if self.index is not None:
            return replace(self, index=self.index[pick.as_index(torch.device("cpu"))])._compact()
        span = pick.span
        if span is None or span.step != 1:
            return replace(self, index=pick.as_index(torch.device("cpu")))._compact()
        kept: list[Piece] = []
        offset = 0
        for piece in self.pieces:
            start, stop = max(span.start - offset, 0), min(span.stop - offset, piece.rows)
            if start < stop:
                kept.append(piece._replace(start=piece.start + start, stop=piece.start + stop))
            offset += piece.rows
        # One piece stays where no row does: it still knows what the column is made of.
        return replace(self, pieces=tuple(kept) or tuple(p._replace(stop=p.start) for p in self.pieces[:1]))

    def _compact(self) -> StoredColumn:
        """Without the pieces that the index does not reach."""
        if self.index is None or len(self.pieces) < 2 or not len(self.index):
            return self
        sizes = torch.tensor([piece.rows for piece in self.pieces])
        ends = sizes.cumsum(0)
        owner = torch.searchsorted(ends, self.index, right=True)
        used = torch.zeros_like(sizes).index_fill(0, owner, 1)
        if bool(used.all()):
            return self
        # How many rows of pieces that go lie before each piece.
        gone = (sizes * (1 - used)).cumsum(0)
        pieces = tuple(piece for piece, keep in zip(self.pieces, used.tolist(), strict=True) if keep)
        return replace(self, pieces=pieces, index=self.index - gone[owner])

    @staticmethod
    def concat(columns: Sequence[StoredColumn]) -> StoredColumn:
        """The rows of all columns, in order."""
        first = columns[0]
        pieces = tuple(piece for column in columns for piece in column.pieces)
        if all(column.index is None for column in columns):
            filled = tuple(piece for piece in pieces if piece.rows) or pieces[:1]
            return replace(first, pieces=filled)
        offset, parts = 0, []
        for column in columns:
            base = sum(piece.rows for piece in column.pieces)
            parts.append((torch.arange(base) if column.index is None else column.index) + offset)
            offset += base
        return replace(first, pieces=pieces, index=torch.cat(parts))._compact()

    def refs(self) -> list[Any]:
        """What has to be fetched for it."""
        return [piece.ref for piece in self.pieces]

    def trimmed(self) -> StoredColumn:
        """For sending: pieces that are at hand are cut to their rows."""

        def cut(piece: Piece) -> Piece:
            if not isinstance(piece.ref, Inline):
                return piece
            rows = piece.ref.value.select([piece.key]).slice(piece.start, piece.stop)
            return Piece(Inline(rows), piece.key, 0, piece.rows)

        return replace(self, pieces=tuple(cut(piece) for piece in self.pieces))


class StoredShard(NamedTuple):
    """What a worker gives back in place of a DataProto that it keeps."""

    length: int
    columns: Mapping[str, StoredColumn]
    meta_info: Mapping[str, Any]


def store_batch(data: DataProto, put: Callable[[DataProto], Any]) -> StoredShard:
    """Put each column into the store by itself; columns that share ragged offsets stay together."""
    together: dict[int, list[str]] = {}
    for name in data.keys():  # noqa: SIM118
        column = data[name]
        ragged = isinstance(column, torch.Tensor) and column.is_nested
        together.setdefault(id(jagged.offsets_of(column)) if ragged else -len(together) - 1, []).append(name)
    dtypes = data.dtypes()
    placed: dict[str, StoredColumn] = {}
    for names in together.values():
        alone = data.select(names, meta_info_keys=[])
        ref = put(alone)
        placed |= {name: StoredColumn(dtypes[name], (Piece(ref, name, 0, len(data)),)) for name in names}
    return StoredShard(len(data), {name: placed[name] for name in data.keys()}, data.meta_info)  # noqa: SIM118


def build_columns(columns: Mapping[str, StoredColumn], length: int, fetch: Fetch, timeout: float | None) -> DataProto:
    """Fetch and join; columns with the same rows of the same stored batches are built together.

    Raises:
        DataProtoError: pieces that are joined differ in dtype or row shape.
    """
    refs = [ref for column in columns.values() for ref in column.refs()]
    wanted = {id(ref): ref for ref in refs if not isinstance(ref, Inline)}
    values = dict(zip(wanted, fetch(list(wanted.values()), timeout), strict=True)) if wanted else {}

    def value_of(ref: Any) -> DataProto:
        found = ref.value if isinstance(ref, Inline) else values[id(ref)]
        if not isinstance(found, DataProto):
            raise DataProtoError(f"the store gave a {type(found).__name__} where a DataProto was put")
        return found

    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, column in columns.items():
        index = None if column.index is None else column.index.numpy().tobytes()
        groups.setdefault((*((id(p.ref), p.start, p.stop) for p in column.pieces), index), []).append(name)
    built: dict[str, torch.Tensor] = {}
    for names in groups.values():
        first = columns[names[0]]
        parts = []
        for position, piece in enumerate(first.pieces):
            source = value_of(piece.ref)
            taken = {name: source._columns()[columns[name].pieces[position].key] for name in names}
            part = DataProto._of(taken, len(source), None)
            parts.append(
                part if piece.start == 0 and piece.stop == len(source) else part.slice(piece.start, piece.stop)
            )
        joined = parts[0] if len(parts) == 1 else DataProto.concat(parts)
        if first.index is not None:
            joined = joined.select_idxs(first.index)
        built |= joined._columns()
    ordered = {name: built[name] for name in columns}
    ops.common_length(ordered, length)
    return DataProto._of(ordered, length, None)
