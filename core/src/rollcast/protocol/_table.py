"""The operations that a batch and a handle to one share: choosing and joining columns and rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, NoReturn, Self, TypeVar, cast, overload

from rollcast.errors import ColumnError, DataProtoError
from rollcast.protocol import _rows as picks
from rollcast.protocol._meta import meta_rules
from rollcast.protocol._rows import Pick, Rows, RowSelector
from rollcast.protocol._values import merge_meta

__all__ = ["Content", "Table", "missing"]

C = TypeVar("C")
T = TypeVar("T", bound="Table[Any]")
Keys = Iterable[str] | str


class MissingColumnError(ColumnError, KeyError):
    """A column is not there; also a ``KeyError``, which mappings are expected to raise."""

    __str__ = Exception.__str__  # KeyError's would put the message in quotes


def missing(name: object, columns: Iterable[str], what: str = "column") -> MissingColumnError:
    """Return the error for a key that is not there, naming those that are."""
    return MissingColumnError(f"no {what} {name!r}; there are {sorted(columns)}")


class Content(NamedTuple, Generic[C]):
    """Rows, columns and meta dict of a table; the columns are tensors, or references to stored ones."""

    length: int
    columns: Mapping[str, C]
    meta_info: dict[str, Any]


class Table(ABC, Generic[C]):
    """Named columns of one length and a meta dict; see :class:`~rollcast.protocol.DataProto`."""

    __slots__ = ()

    # ---- to be filled ----

    @abstractmethod
    def _content(self) -> Content[C]:
        """Return the live content, which the caller must not change."""

    @abstractmethod
    def _like(self, length: int, columns: Mapping[str, C], meta_info: dict[str, Any]) -> Self:
        """Return a table of this kind from columns that fit; copies the meta dict."""

    @abstractmethod
    def _read(self, name: str) -> Any:
        """Return the values of a column that may be missing."""

    @abstractmethod
    def _accept(self, operation: str, other: object) -> Table[C]:
        """Return ``other`` as a table of this kind, or raise ``DataProtoError``."""

    @property
    @abstractmethod
    def _precedence(self) -> int:
        """Of several members, the one with the largest value decides the kind of the result."""

    @staticmethod
    @abstractmethod
    def _pick(columns: Mapping[str, C], pick: Pick) -> dict[str, C]:
        """Return the picked rows of the columns."""

    @staticmethod
    @abstractmethod
    def _clash(name: str, mine: C, theirs: C) -> str | None:
        """Return why two columns of one name cannot be taken for one; None if they are equal."""

    @staticmethod
    @abstractmethod
    def _concat(members: Sequence[Mapping[str, C]]) -> dict[str, C]:
        """Join the rows of members with the same keys."""

    # ---- reading ----

    def __len__(self) -> int:
        return self._content().length

    def keys(self) -> list[str]:
        """Return the names of all columns, in the order in which they were added."""
        return list(self._content().columns)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key in self._content().columns

    @overload
    def __getitem__(self, key: str) -> Any: ...

    @overload
    def __getitem__(self, key: RowSelector) -> Self: ...

    def __getitem__(self, key: str | RowSelector) -> Any:
        """Return a column by name (tensor or object array), or a table of the chosen rows.

        Raises:
            ColumnError: no column of that name (also a ``KeyError``).
            DataProtoError: rows out of range (also an ``IndexError``), or no valid selector.
        """
        if isinstance(key, str):
            return self._read(key)
        return self._take(picks.pick_rows(key, len(self)))

    def __iter__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} is not iterable, because its length counts rows and `in` looks for columns:"
            " iterate over keys() for the columns, or over split(1) for the rows"
        )

    # ---- verl's operations in place, which would be no-ops here ----

    def union(self, *_: object, **__: object) -> NoReturn:
        """Raise; use :meth:`joined`."""
        raise _in_place("union", "batch = batch.joined(other)")

    def reorder(self, *_: object, **__: object) -> NoReturn:
        """Raise; use :meth:`reordered`."""
        raise _in_place("reorder", "batch = batch.reordered(indices)")

    def pop(self, *_: object, **__: object) -> NoReturn:
        """Raise; use :meth:`select` and :meth:`drop`."""
        raise _in_place("pop", "taken, batch = batch.select(keys), batch.drop(keys)")

    # ---- choosing columns ----

    def _named(self, keys: Keys) -> list[str]:
        names = [keys] if isinstance(keys, str) else list(keys)
        there = self.keys()
        for name in names:
            if name not in there:
                raise missing(name, there)
        return names

    def select(self, keys: Keys | None = None, meta_info_keys: Iterable[str] | None = None) -> Self:
        """Return only these columns, of any kind, and these meta keys; ``None`` keeps all of them.

        Raises:
            ColumnError: a column or meta key is not there.
        """
        length, columns, meta = self._content()
        if keys is not None:
            columns = {name: columns[name] for name in self._named(keys)}
        if meta_info_keys is not None:
            wanted = list(meta_info_keys)
            for key in wanted:
                if key not in meta:
                    raise missing(key, meta, "meta_info key")
            meta = {key: meta[key] for key in wanted}
        return self._like(length, columns, meta)

    def drop(self, keys: Keys) -> Self:
        """Return all columns but these; raises ``ColumnError`` for one that is not there."""
        gone = set(self._named(keys))
        length, columns, meta = self._content()
        return self._like(length, {name: column for name, column in columns.items() if name not in gone}, meta)

    def rename(self, mapping: Mapping[str, str]) -> Self:
        """Return the columns under new names, in their old places.

        Raises:
            ColumnError: an old name is not there.
            DataProtoError: a new name is no non-empty string, or two columns would have one name.
        """
        self._named(mapping)
        length, columns, meta = self._content()
        renamed: dict[str, C] = {}
        for old, column in columns.items():
            new = mapping.get(old, old)
            if new in renamed:
                raise DataProtoError(f"rename: two columns would be called {new!r}")
            renamed[check_name(new)] = column
        return self._like(length, renamed, meta)

    def joined(self, other: Any, overwrite: bool = False) -> Self:
        """Return the columns and meta of both, which have one length.

        Args:
            other: A DataProto; a handle can be joined with a handle too.
            overwrite: Take columns and meta keys that both have from ``other``. Otherwise their values must be
                equal; a handle cannot compare columns without fetching them, so it refuses different ones.

        Raises:
            DataProtoError: lengths differ, or a column or meta key differs; names it.
        """
        added = self._accept("joined", other)
        length, columns, meta = self._content()
        rows, more, other_meta = added._content()
        if length != rows:
            raise DataProtoError(f"joined: {length} rows here but {rows} in the other")
        # A handle to local rows can fetch nothing, so the result takes the other's connection.
        lead = self if self._precedence >= added._precedence else added
        for name, column in () if overwrite else more.items():
            if name in columns and (why := lead._clash(name, columns[name], column)):
                raise DataProtoError(f"joined: {why}; drop or rename one, or pass overwrite=True")
        merged = merge_meta([meta, other_meta], "joined", overwrite=overwrite)
        return cast("Self", lead._like(length, {**columns, **more}, merged))

    # ---- choosing rows ----

    def _take(self, pick: Pick) -> Self:
        _, columns, meta = self._content()
        return self._like(pick.rows, self._pick(columns, pick), meta)

    def select_idxs(self, idxs: Rows) -> Self:
        """Return the rows of these numbers, in this order, or where a mask ``[len]`` is true."""
        return self._take(picks.pick_index(idxs, len(self)))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Return the rows of a Python slice; views of this batch's storage for a positive step."""
        return self._take(picks.pick_slice(slice(start, end, step), len(self)))

    def _spans(self, size: int) -> list[Self]:
        length, columns, meta = self._content()
        found = []
        for start in range(0, max(length, 1), size):
            pick = picks.pick_slice(slice(start, start + size), length)
            found.append(self._like(pick.rows, self._pick(columns, pick), meta))
        return found

    def chunk(self, chunks: int) -> list[Self]:
        """Return ``chunks`` pieces of equal length, as views, in order; empty ones if there are no rows.

        Raises:
            DataProtoError: ``chunks`` does not divide the length; names lengths that fit.
        """
        picks.require_divisible("chunk", len(self), picks.check_count("chunk: chunks", chunks), "chunks")
        if not len(self):
            return [self.slice() for _ in range(chunks)]
        return self._spans(len(self) // chunks)

    def split(self, size: int) -> list[Self]:
        """Return pieces of ``size`` rows, as views; the last may be shorter, and there is at least one."""
        return self._spans(picks.check_count("split: size", size))

    def repeat(self, times: int, interleave: bool = True) -> Self:
        """Return every row ``times`` times: ``aabb`` if interleaved, else ``abab``."""
        picks.check_count("repeat: times", times, minimum=0)
        return self._take(picks.pick_repeated(len(self), times, interleave))

    def reordered(self, indices: Rows) -> Self:
        """Return the rows in the order of ``indices [len]``, which contain each row number once.

        Raises:
            DataProtoError: ``indices`` is no permutation; for other choices use ``select_idxs``.
        """
        return self._take(picks.pick_permutation(indices, len(self)))

    def pad_to_divisor(self, divisor: int, mode: Literal["last", "first", "cycle"] = "last") -> tuple[Self, int]:
        """Return ``(padded, pad_size)``: rows added at the end until ``divisor`` divides the length.

        An empty batch stays empty. :meth:`unpad` removes the added rows.

        Args:
            mode: Rows to add: the last row, the first row, or all rows in turn.
        """
        pick, pad_size = picks.pick_padded(len(self), picks.check_count("pad: divisor", divisor), mode)
        return self._take(pick), pad_size

    def unpad(self, pad_size: int) -> Self:
        """Return all but the last ``pad_size`` rows, as views."""
        if picks.check_count("unpad: pad_size", pad_size, minimum=0) > len(self):
            raise DataProtoError(f"unpad: {pad_size} rows cannot be taken off {len(self)}")
        return self.slice(0, len(self) - pad_size)

    @classmethod
    def concat(cls, members: Sequence[T]) -> T:
        """Join the rows of all members, in order; class and order of columns are the first member's.

        Called on a subclass of that class, the result is of the subclass.
        A meta key that differs is merged by its rule in :data:`rollcast.protocol.meta_rules`, which has one for
        ``metrics``. With a handle among the members the result is a handle, and no rows move.

        Raises:
            DataProtoError: no members; keys differ; a column differs in kind, dtype, row shape or
                device; a meta key has different values and no rule. Names the column or key.
        """
        if not members:
            raise DataProtoError("concat: the list is empty, so the columns are unknown")
        for member in members:
            if not isinstance(member, Table):
                raise DataProtoError(f"concat: a member is a {type(member).__name__}, not a DataProto")
        lead = max(members, key=_precedence)
        contents = [lead._accept("concat", member)._content() for member in members]
        first = contents[0].columns
        for position, content in enumerate(contents):
            if odd := sorted(content.columns.keys() ^ first.keys()):
                raise DataProtoError(
                    f"concat: columns {odd} are not in both member 0 and member {position};"
                    " select or drop columns so that all members have the same"
                )
        meta = merge_meta([content.meta_info for content in contents], "concat", rules=meta_rules)
        columns = lead._concat([content.columns for content in contents])
        joined = lead._like(sum(content.length for content in contents), columns, meta)
        return cast(T, cls._promoted(joined)) if issubclass(cls, type(joined)) else joined

    @classmethod
    def _promoted(cls, table: Any) -> Any:
        """Return a table of a base class as one of this class."""
        return table


def check_name(name: object) -> str:
    """Return a column name that is a non-empty string; else raise ``DataProtoError``."""
    if not isinstance(name, str) or not name:
        raise DataProtoError(f"a column name is a non-empty string, not {name!r}")
    return name


def _precedence(table: Table[Any]) -> int:
    return table._precedence


def _in_place(name: str, instead: str) -> DataProtoError:
    return DataProtoError(
        f"{name}() changes a batch in place in verl; here no operation does, and its dropped result would go"
        f" unnoticed: write `{instead}`"
    )
