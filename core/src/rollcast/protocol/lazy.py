"""LazyBatch: a DataProto with columns partly in this process and partly on workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import torch

from rollcast.protocol import _columns as ops
from rollcast.protocol import _jagged as jagged
from rollcast.protocol._rows import Pick
from rollcast.protocol._table import Content, Table
from rollcast.protocol.batch import DataProto
from rollcast.protocol.future import DataProtoFuture

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["LazyBatch"]


class _Rows:
    """Rows of a handle, with those of their columns that have been fetched.

    Args:
        handle: The rows.
        values: Fetched columns, by their names in the handle.
        origin: Rows from which these were picked, and the pick; columns fetched for the origin are not fetched again.
    """

    __slots__ = ("handle", "origin", "values")

    def __init__(
        self,
        handle: DataProtoFuture,
        values: Mapping[str, torch.Tensor] | None = None,
        origin: tuple[_Rows, Pick] | None = None,
    ) -> None:
        self.handle = handle
        self.values = dict(values or {})
        self.origin = origin

    def value(self, source: str) -> torch.Tensor | None:
        """Return a column if it is in this process, else None."""
        if source not in self.values and self.origin is not None:
            rows, pick = self.origin
            whole = rows.value(source)
            if whole is not None:
                self.values[source] = ops.take(whole, pick)
        return self.values.get(source)

    def remember(self, source: str, value: torch.Tensor) -> torch.Tensor:
        """Cache a fetched column and return it.

        If another cached column has equal offsets, the column shares them, because torch can combine two jagged tensors
        only if they share offsets.
        """
        for other in self.values.values():
            if not (jagged.is_jagged(value) and jagged.is_jagged(other)):
                continue
            offsets = jagged.offsets_of(other)
            if torch.equal(offsets, jagged.offsets_of(value)):
                value = jagged.build(jagged.values_of(value), offsets)
                break
        self.values[source] = value
        return value


class _Away(NamedTuple):
    """A column of a handle."""

    rows: _Rows
    source: str

    def alone(self, name: str) -> DataProtoFuture:
        """Return a handle with only this column, called ``name``."""
        return self.rows.handle.select([self.source], []).rename({self.source: name})


Column = torch.Tensor | _Away


class LazyBatch(DataProto):
    """A DataProto with columns partly in this process and partly on workers.

    A column of a handle is fetched and cached when it is first read. Its name is known while its call is running, and
    reading a column waits only for the call of this column. Selecting, joining and splitting moves no data. When the
    batch is passed to a worker group, columns of handles are sent from worker to worker, and columns in this process
    are sent inline::

        batch = batch.joined(LazyBatch.of(group.compute_values.remote(batch), ["values"]))
        batch["response_mask"]      # fetches this column
        batch.local(["values"])     # a DataProto; waits for compute_values
    """

    __slots__ = ()

    @classmethod
    def of(
        cls,
        handle: DataProtoFuture,
        names: Iterable[str] | None = None,
        values: Mapping[str, torch.Tensor] | None = None,
    ) -> Self:
        """Build a batch from the columns of a handle.

        Args:
            handle: The rows.
            names: Names of the handle's columns, whose call may be running; None to wait for the call and take all.
            values: Columns whose values this process already has, so that they are not fetched.
        """
        rows = _Rows(handle, values)
        columns = {name: _Away(rows, name) for name in (handle.keys() if names is None else names)}
        return cls._of(len(handle), cast("dict[str, torch.Tensor]", columns), None)

    def _mixed(self) -> dict[str, Column]:
        """Return the columns, without fetching those on workers."""
        return cast("dict[str, Column]", super()._columns())

    def _fetched(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return columns, fetching all missing ones together."""
        columns = self._mixed()
        found: dict[str, torch.Tensor | None] = {}
        for name in names:
            column = columns[name]
            found[name] = column.rows.value(column.source) if isinstance(column, _Away) else column
        wanted = [name for name, value in found.items() if value is None]
        arrived = self.handle(wanted).read().owned()._columns() if wanted else {}
        return {name: arrived[name] if value is None else value for name, value in found.items()}

    # ---- reading ----

    def handle(self, keys: Iterable[str] | str | None = None) -> DataProtoFuture:
        """Return these columns (all by default) as a handle; columns on workers stay there."""
        # Columns with the same rows stay grouped, so that they are cut and read together.
        by_rows: dict[int, tuple[_Rows, dict[str, str]]] = {}
        alone: list[DataProtoFuture] = []
        here: dict[str, torch.Tensor] = {}
        columns = self._mixed()
        names = list(columns) if keys is None else self._named(keys)
        for name in names:
            column = columns[name]
            if not isinstance(column, _Away):
                here[name] = column
                continue
            _, sources = by_rows.setdefault(id(column.rows), (column.rows, {}))
            if column.source in sources:
                alone.append(column.alone(name))
            else:
                sources[column.source] = name
        parts = [rows.handle.select(list(sources), []).rename(sources) for rows, sources in by_rows.values()]
        if here or not parts:
            parts.append(DataProtoFuture.of_batch(DataProto._of(len(self), here, None)))
        made = parts[0]
        for part in (*parts[1:], *alone):
            made = made.joined(part)
        return made.select(names)

    def local(self, keys: Iterable[str] | str | None = None) -> DataProto:
        names = self.keys() if keys is None else self._named(keys)
        return DataProto._of(len(self), self._fetched(names), self.meta_info)

    @property
    def batch(self) -> TensorDict:
        """The live TensorDict ``[len]`` of all columns; fetches those on workers."""
        if self._tensordict is None:
            self._held = self._columns()
        return super().batch

    def _columns(self) -> ops.Columns:
        return self._fetched(self.keys())

    def _column(self, name: str) -> torch.Tensor | None:
        column = cast("Column | None", super()._column(name))
        if not isinstance(column, _Away):
            return column
        return column.rows.remember(column.source, self._fetched([name])[name])

    @property
    def nbytes(self) -> int:
        """Size of the columns in this process in bytes."""
        here = (column for column in self._mixed().values() if not isinstance(column, _Away))
        return sum(map(ops.column_nbytes, here))

    def __repr__(self) -> str:
        columns = self._mixed()
        away = [name for name, column in columns.items() if isinstance(column, _Away)]
        here = [name for name in columns if name not in away]
        return f"LazyBatch(rows={len(self)}, here={here}, with workers={away})"

    # ---- operations ----

    _precedence = 3

    def _content(self) -> Content[torch.Tensor]:
        return Content(self._length, cast("ops.Columns", self._mixed()), self.meta_info)

    @classmethod
    def _promoted(cls, table: Any) -> Any:
        return table

    def _accept(self, operation: str, other: object) -> DataProto:
        return self.of(other) if isinstance(other, DataProtoFuture) else super()._accept(operation, other)

    @staticmethod
    def _pick(columns: Mapping[str, torch.Tensor], pick: Pick) -> ops.Columns:
        taken: dict[int, _Rows] = {}
        found: dict[str, Column] = {}
        for name, column in cast("Mapping[str, Column]", columns).items():
            if not isinstance(column, _Away):
                found[name] = ops.take(column, pick)
                continue
            rows = column.rows
            if id(rows) not in taken:
                taken[id(rows)] = _Rows(rows.handle._take(pick), origin=(rows, pick))
            found[name] = _Away(taken[id(rows)], column.source)
        return cast("ops.Columns", found)

    def _spans(self, size: int) -> list[Self]:
        # DataProto's implementation splits tensors.
        return Table._spans(self, size)

    @staticmethod
    def _clash(name: str, mine: torch.Tensor, theirs: torch.Tensor) -> str | None:
        both: tuple[Any, Any] = (mine, theirs)
        away = [column for column in both if isinstance(column, _Away)]
        if not away:
            return DataProto._clash(name, mine, theirs)
        return None if len(away) == 2 and away[0] == away[1] else _unknown(name)

    @staticmethod
    def _concat(members: Sequence[Mapping[str, torch.Tensor]]) -> ops.Columns:
        joined: dict[tuple[int, ...], _Rows] = {}
        found: dict[str, Column] = {}
        here: list[str] = []
        for name in members[0]:
            parts = [cast("Column", member[name]) for member in members]
            away = [part for part in parts if isinstance(part, _Away)]
            if not away:
                here.append(name)
            elif len(away) == len(parts) and len({part.source for part in away}) == 1:
                key, source = tuple(id(part.rows) for part in away), away[0].source
                if key not in joined:
                    used = dict.fromkeys(_sources(members[0], away[0].rows))
                    handles = [part.rows.handle.select(list(used), []) for part in away]
                    joined[key] = _Rows(DataProtoFuture.concat(handles))
                found[name] = _Away(joined[key], source)
            else:
                handles = [
                    part.alone(name)
                    if isinstance(part, _Away)
                    else DataProtoFuture.of_batch(DataProto.from_single_dict({name: part}))
                    for part in parts
                ]
                found[name] = _Away(_Rows(DataProtoFuture.concat(handles)), name)
        local = ops.concat_columns([{name: member[name] for name in here} for member in members])
        return cast("ops.Columns", {name: local[name] if name in local else found[name] for name in members[0]})

    def with_columns(self, mapping: Mapping[str, Any] | None = None, /, **columns: Any) -> Self:
        """Return a batch with columns added or replaced, as columns in this process."""
        added = DataProto(length=len(self)).with_columns(mapping, **columns)
        return self._like(len(self), {**self._content().columns, **added._columns()}, self.meta_info)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Another process gets a handle, which fetches rows from the workers that store them.
        return self.handle().__reduce_ex__(protocol)  # type: ignore[return-value]


def _sources(columns: Mapping[str, Any], rows: _Rows) -> list[str]:
    """Return the names in the handle of the columns that use these rows."""
    return [column.source for column in columns.values() if isinstance(column, _Away) and column.rows is rows]


def _unknown(name: str) -> str:
    return f"column {name!r} is in both, and whether the values are equal cannot be told without moving them"
