"""The operations shared by batches and handles: selecting and joining columns and rows."""

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
    """An error for a missing column; also a ``KeyError``, as expected of mappings."""

    __str__ = Exception.__str__  # KeyError.__str__ would quote the message


def missing(name: object, columns: Iterable[str], what: str = "column") -> MissingColumnError:
    """Build the error for a missing key; the message lists the existing keys."""
    return MissingColumnError(f"no {what} {name!r}; there are {sorted(columns)}")


class Content(NamedTuple, Generic[C]):
    """The row count, columns and meta dict of a table; columns are tensors, or references to stored ones."""

    length: int
    columns: Mapping[str, C]
    meta_info: dict[str, Any]


class Table(ABC, Generic[C]):
    """Named columns of one length and a meta dict; see :class:`~rollcast.protocol.DataProto`."""

    __slots__ = ()

    # ---- abstract methods ----

    @abstractmethod
    def _content(self) -> Content[C]:
        """Return the table's content, which the caller must not change."""

    @abstractmethod
    def _like(self, length: int, columns: Mapping[str, C], meta_info: dict[str, Any]) -> Self:
        """Build a table of this kind from columns of ``length`` rows; copies the meta dict."""

    @abstractmethod
    def _read(self, name: str) -> Any:
        """Return the values of a column; raise ``MissingColumnError`` if there is no such column."""

    @abstractmethod
    def _accept(self, operation: str, other: object) -> Table[C]:
        """Return ``other`` as a table of this kind, or raise ``DataProtoError``."""

    @property
    @abstractmethod
    def _precedence(self) -> int:
        """Precedence of this kind of table; the member with the highest value determines the kind of a result."""

    @staticmethod
    @abstractmethod
    def _pick(columns: Mapping[str, C], pick: Pick) -> dict[str, C]:
        """Return the picked rows of the columns."""

    @staticmethod
    @abstractmethod
    def _clash(name: str, mine: C, theirs: C) -> str | None:
        """Return the reason why two columns of one name cannot be merged; None if they are equal."""

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
        """Return a column by name (tensor or object array), or a table of the selected rows.

        Raises:
            ColumnError: there is no such column (also a ``KeyError``).
            DataProtoError: a row is out of range (also an ``IndexError``), or the selector is invalid.
        """
        if isinstance(key, str):
            return self._read(key)
        return self._take(picks.pick_rows(key, len(self)))

    def __iter__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} is not iterable, because its length counts rows and `in` looks for columns:"
            " iterate over keys() for the columns, or over split(1) for the rows"
        )

    # ---- verl's in-place operations, which would have no effect here ----

    def union(self, *_: object, **__: object) -> NoReturn:
        """Raise an error; use :meth:`joined`."""
        raise _in_place("union", "batch = batch.joined(other)")

    def reorder(self, *_: object, **__: object) -> NoReturn:
        """Raise an error; use :meth:`reordered`."""
        raise _in_place("reorder", "batch = batch.reordered(indices)")

    def pop(self, *_: object, **__: object) -> NoReturn:
        """Raise an error; use :meth:`select` and :meth:`drop`."""
        raise _in_place("pop", "taken, batch = batch.select(keys), batch.drop(keys)")

    # ---- selecting columns ----

    def _named(self, keys: Keys) -> list[str]:
        names = [keys] if isinstance(keys, str) else list(keys)
        there = self.keys()
        for name in names:
            if name not in there:
                raise missing(name, there)
        return names

    def select(self, keys: Keys | None = None, meta_info_keys: Iterable[str] | None = None) -> Self:
        """Return a table with only these columns and meta keys; ``None`` keeps all.

        Raises:
            ColumnError: a column or meta key does not exist.
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
        """Return a table without these columns; raise ``ColumnError`` if a column does not exist."""
        gone = set(self._named(keys))
        length, columns, meta = self._content()
        return self._like(length, {name: column for name, column in columns.items() if name not in gone}, meta)

    def rename(self, mapping: Mapping[str, str]) -> Self:
        """Return a table with renamed columns, in the same order.

        Raises:
            ColumnError: a column to rename does not exist.
            DataProtoError: a new name is not a non-empty string, or two columns would have the same name.
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
        """Return a table with the columns and meta of both tables, which must have equal lengths.

        Args:
            other: A DataProto, or a handle if this is a handle too.
            overwrite: True to take columns and meta keys that both have from ``other``. Otherwise, their values must
                be equal; a handle refuses columns that it cannot compare without fetching them.

        Raises:
            DataProtoError: lengths differ, or a column or meta key differs; names it.
        """
        added = self._accept("joined", other)
        length, columns, meta = self._content()
        rows, more, other_meta = added._content()
        if length != rows:
            raise DataProtoError(f"joined: {length} rows here but {rows} in the other")
        # A handle to local rows has no store connection, so the result takes the other's.
        lead = self if self._precedence >= added._precedence else added
        for name, column in () if overwrite else more.items():
            if name in columns and (why := lead._clash(name, columns[name], column)):
                raise DataProtoError(f"joined: {why}; drop or rename one, or pass overwrite=True")
        merged = merge_meta([meta, other_meta], "joined", overwrite=overwrite)
        return cast("Self", lead._like(length, {**columns, **more}, merged))

    # ---- selecting rows ----

    def _take(self, pick: Pick) -> Self:
        _, columns, meta = self._content()
        return self._like(pick.rows, self._pick(columns, pick), meta)

    def select_idxs(self, idxs: Rows) -> Self:
        """Return the rows with these indices, in this order, or the rows where a mask ``[len]`` is True."""
        return self._take(picks.pick_index(idxs, len(self)))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Return the rows of a Python slice, as views if the step is positive."""
        return self._take(picks.pick_slice(slice(start, end, step), len(self)))

    def _spans(self, size: int) -> list[Self]:
        length, columns, meta = self._content()
        found = []
        for start in range(0, max(length, 1), size):
            pick = picks.pick_slice(slice(start, start + size), length)
            found.append(self._like(pick.rows, self._pick(columns, pick), meta))
        return found

    def chunk(self, chunks: int) -> list[Self]:
        """Split into ``chunks`` pieces of equal length, as views, in order; empty pieces if there are no rows.

        Raises:
            DataProtoError: ``chunks`` does not divide the length; names valid lengths.
        """
        picks.require_divisible("chunk", len(self), picks.check_count("chunk: chunks", chunks), "chunks")
        if not len(self):
            return [self.slice() for _ in range(chunks)]
        return self._spans(len(self) // chunks)

    def split(self, size: int) -> list[Self]:
        """Split into pieces of ``size`` rows, as views; the last may be shorter, and there is at least one piece."""
        return self._spans(picks.check_count("split: size", size))

    def repeat(self, times: int, interleave: bool = True) -> Self:
        """Repeat every row ``times`` times: ``aabb`` if interleaved, else ``abab``."""
        picks.check_count("repeat: times", times, minimum=0)
        return self._take(picks.pick_repeated(len(self), times, interleave))

    def reordered(self, indices: Rows) -> Self:
        """Return the rows in the order of ``indices [len]``, a permutation of the row numbers.

        Raises:
            DataProtoError: ``indices`` is not a permutation; use ``select_idxs`` for other selections.
        """
        return self._take(picks.pick_permutation(indices, len(self)))

    def pad_to_divisor(self, divisor: int, mode: Literal["last", "first", "cycle"] = "last") -> tuple[Self, int]:
        """Append rows until ``divisor`` divides the length; return ``(padded, pad_size)``.

        An empty batch stays empty. :meth:`unpad` removes the added rows.

        Args:
            mode: Rows to append: copies of the last row, of the first row, or of all rows in turn.
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
        """Concatenate the rows of all members; the first member determines the class and the order of columns.

        If called on a subclass of the first member's class, the result has that subclass.
        Differing values of a meta key are merged by the key's rule in :data:`rollcast.protocol.meta_rules`, which has
        a rule for ``metrics``. If a member is a handle, the result is a handle, and no rows are fetched.

        Raises:
            DataProtoError: there are no members; their keys differ; a column differs in kind, dtype, row shape or
                device; or a meta key has different values and no rule. Names the column or key.
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
        """Convert a table of a base class to this class."""
        return table


def check_name(name: object) -> str:
    """Return ``name`` if it is a non-empty string, else raise ``DataProtoError``."""
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
