"""DataProto: the batch that every stage of training reads and returns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Self, TypeVar, overload

import numpy as np
import torch

from rollcast.errors import DataProtoError
from rollcast.protocol import _columns as ops
from rollcast.protocol import _remote as remote
from rollcast.protocol import _rows as picks
from rollcast.protocol import _storage, _wire
from rollcast.protocol._columns import missing
from rollcast.protocol._meta import meta_rules
from rollcast.protocol._objects import ObjectColumn
from rollcast.protocol._remote import ALL, Column, Fetch, Reading, Remote, RowMap, StoredBatch
from rollcast.protocol._rows import Pick, Rows, RowSelector
from rollcast.protocol._values import copy_meta, merge_meta, same_value

if TYPE_CHECKING:
    from tensordict import TensorDict, TensorDictBase

__all__ = ["Content", "DataProto", "store_batch"]

T = TypeVar("T", bound="DataProto")
Keys = Iterable[str] | str


class Content(NamedTuple):
    """The row count, columns and meta dict of a batch."""

    length: int
    columns: Mapping[str, Column]
    meta_info: dict[str, Any]


class DataProto:
    """A batch: columns of tensors, jagged tensors, Python objects and remote columns, and a dict of metadata.

    **Names refer to columns, lengths and indices to rows.** ``"x" in batch``, ``batch["x"]``, ``batch.keys()``,
    ``dict(batch)`` and ``**batch`` access columns, as for a dict of columns. ``len(batch)`` counts rows, and
    ``batch[3]``, ``batch[2:5]`` and ``batch[[4, 0]]`` select rows, as for a tensor. Iterating over a DataProto is
    ambiguous, so it raises ``TypeError``: iterate over ``keys()`` or ``split(1)``.

    **No operation changes a DataProto.** Each operation returns a new DataProto, which may share tensor storage but
    never shares ``meta_info`` or a container in it. ``union``, ``reorder`` and ``pop``, which change a batch in place
    in verl, raise an error that names the operation to use instead: ``joined``, ``reordered``, ``select`` and ``drop``.
    To change a DataProto, assign to ``.batch[key]`` or ``.non_tensor_batch[key]``, or edit ``.meta_info``.

    **A remote column stays on the workers that computed it** until it is read. Selecting, joining and splitting moves
    no data, and a worker to which the batch is passed reads the rows that it needs from the workers that store them. A
    column is read and kept when it is first looked at; :meth:`local` reads several together. While the call that
    computes a column is in flight, reading the column waits for this call only::

        batch = batch.joined(critic.compute_values.remote(batch).select("values"))
        batch["response_mask"]      # waits for no call
        batch.local(["values"])     # waits for compute_values

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
    # `_held` may have the column ALL, which stands for the columns of a call in flight.
    __slots__ = ("__weakref__", "_held", "_length", "_meta", "_tensordict")

    _meta: dict[str, Any]
    _length: int
    _held: dict[str, Column]
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

    def _fill(self, length: int, columns: Mapping[str, Column], meta_info: Mapping[str, Any] | None) -> None:
        self._held = dict(columns)
        self._length = length
        self._tensordict = None
        self._meta = copy_meta(meta_info)

    @classmethod
    def _of(cls, length: int, columns: Mapping[str, Column], meta_info: Mapping[str, Any] | None) -> Self:
        """Build a DataProto from columns that are known to be valid."""
        instance = cls.__new__(cls)
        instance._fill(length, columns, meta_info)
        return instance

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
        """The live TensorDict ``[len]``; ``dp.batch["x"] = tensor`` changes this DataProto only. Reads all columns."""
        if self._tensordict is None:
            from tensordict import TensorDict

            self._tensordict = TensorDict(self._columns(), batch_size=[self._length])
            self._held = {}
        return self._tensordict

    @property
    def non_tensor_batch(self) -> MutableMapping[str, Any]:
        """The object columns, as a live mapping of read-only object arrays ``[len]``."""
        return ObjectColumnsView(self)

    @property
    def meta_info(self) -> dict[str, Any]:
        """The metadata."""
        self._named()
        return self._meta

    @meta_info.setter
    def meta_info(self, meta_info: dict[str, Any]) -> None:
        self._named()
        self._meta = meta_info

    def _raw(self) -> Mapping[str, Column]:
        """Return the columns, of which one may be ``ALL``, without reading or waiting for any."""
        return self._held if self._tensordict is None else ops.from_tensordict(self._tensordict)

    def _named(self) -> Mapping[str, Column]:
        """Return the columns by name, after waiting for the calls whose columns are unknown."""
        everything = self._held.get(ALL)
        if isinstance(everything, Remote):
            named, meta = _results(everything.rows)
            self._held = {**named, **{name: column for name, column in self._held.items() if name != ALL}}
            self._meta = {**meta, **self._meta}
        return self._raw()

    def _columns(self) -> ops.Columns:
        """Return all columns, after reading the remote ones together."""
        return self._read_columns(self._named())

    def _read_columns(self, names: Iterable[str], timeout: float | None = None) -> ops.Columns:
        columns = self._raw()
        known: dict[str, torch.Tensor | None] = {}
        away: dict[str, Remote] = {}
        for name in names:
            column = columns[name]
            known[name] = column.value if isinstance(column, Remote) else column
            if isinstance(column, Remote) and known[name] is None:
                away[name] = column
        arrived = remote.read(away, timeout).owned() if away else {}
        return {name: arrived[name] if value is None else value for name, value in known.items()}

    def _column(self, name: str) -> torch.Tensor | None:
        column = (self._held if self._tensordict is None else self._tensordict).get(name, None)
        if column is None and ALL in self._held:
            column = self._named().get(name)
        if not isinstance(column, Remote):
            return None if column is None else ops.as_column(name, column) if self._tensordict is not None else column
        return column.rows.remember(column.source, self._read_columns([name])[name])

    def __len__(self) -> int:
        return self._length

    def keys(self) -> list[str]:
        """Return the names of all columns, in the order in which they were added."""
        return list(self._named()) if self._tensordict is None else [str(key) for key in self._tensordict.keys()]  # noqa: SIM118

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and (key in self._held or key in self.keys())

    @overload
    def __getitem__(self, key: str) -> Any: ...

    @overload
    def __getitem__(self, key: RowSelector) -> Self: ...

    def __getitem__(self, key: str | RowSelector) -> Any:
        """Return a column by name (tensor or object array), or a batch of the selected rows.

        Raises:
            ColumnError: there is no such column (also a ``KeyError``).
            DataProtoError: a row is out of range (also an ``IndexError``), or the selector is invalid.
        """
        if not isinstance(key, str):
            return self._take(picks.pick_rows(key, len(self)))
        column = self._column(key)
        if column is None:
            raise missing(key, self.keys())
        return column.objects() if isinstance(column, ObjectColumn) else column

    def __iter__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} is not iterable, because its length counts rows and `in` looks for columns:"
            " iterate over keys() for the columns, or over split(1) for the rows"
        )

    def local(self, keys: Keys | None = None, timeout: float | None = None) -> Self:
        """Return these columns (all by default) as a batch with all columns in this process.

        Remote columns are fetched together and are not kept in this batch.

        Args:
            timeout: Deadline in seconds for the calls that compute the columns and for each fetch.

        Raises:
            WorkerError: a call failed, or the deadline passed.
        """
        names = self.keys() if keys is None else self._chosen(keys)
        return self._of(len(self), self._read_columns(names, timeout), self._meta)

    def read(self, timeout: float | None = None) -> Reading:
        """Return all columns; the remote ones are fetched without copying rows in shared memory."""
        away = self.remote_columns()
        reading = remote.read(away, timeout) if away else Reading({}, frozenset())
        local = {name: column for name, column in self._raw().items() if not isinstance(column, Remote)}
        arrived = {**local, **reading.columns}
        return reading._replace(columns={name: arrived[name] for name in self._raw()})

    def remote_columns(self) -> dict[str, Remote]:
        """Return the remote columns."""
        return {name: column for name, column in self._named().items() if isinstance(column, Remote)}

    def dtypes(self) -> dict[str, torch.dtype | type[object]]:
        """Return the dtype of each column; ``object`` for object columns. Waits for calls in flight."""
        settled = remote.settle(self.remote_columns())
        dtype_by_name: dict[str, torch.dtype | type[object]] = {}
        for name, column in self._raw().items():
            dtype = settled[name].dtype if isinstance(column, Remote) else column.dtype
            dtype_by_name[name] = object if isinstance(column, ObjectColumn) or dtype is None else dtype
        return dtype_by_name

    @property
    def nbytes(self) -> int:
        """Size of the rows in this process in bytes; object columns count only 8 bytes per row for positions."""
        return sum(ops.column_nbytes(column) for column in self._raw().values() if not isinstance(column, Remote))

    def check_consistency(self) -> None:
        """Check names, kinds and lengths again; raise ``DataProtoError`` naming the invalid column."""
        ops.common_length(self._columns(), len(self))

    def __repr__(self) -> str:
        lines = [f"DataProto(rows={len(self)}, {self.nbytes / 1e6:.3g} MB"]
        for name, column in self._raw().items():
            if isinstance(column, Remote):
                lines.append(f"  {name or 'the columns of a call in flight'}: remote")
            elif isinstance(column, ObjectColumn):
                first = f", first: {column[0].item()!r:.40}" if len(self) else ""
                lines.append(f"  {name}: objects{first}")
            else:
                sizes = [str(n) if isinstance(n, int) else "ragged" for n in column.shape[1:]]
                dtype = str(column.dtype).removeprefix("torch.")
                lines.append(f"  {name}: {dtype}[{', '.join(['rows', *sizes])}] {column.device}")
        if self._meta:
            lines.append(f"  meta_info: {sorted(map(str, self._meta))}")
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

    def _content(self) -> Content:
        """Return the length, the columns, of which one may be ``ALL``, and the meta dict."""
        return Content(self._length, self._raw(), self._meta)

    def _chosen(self, keys: Keys) -> list[str]:
        """Return names as a list; raise ``ColumnError`` if one is not a column."""
        names = [keys] if isinstance(keys, str) else list(keys)
        for name in names:
            if name not in self:
                raise missing(name, self.keys())
        return names

    def select(self, keys: Keys | None = None, meta_info_keys: Iterable[str] | None = None) -> Self:
        """Return a batch with only these columns and meta keys; ``None`` keeps all.

        Columns of a call in flight are not checked: a missing one raises when it is read.

        Raises:
            ColumnError: a column or meta key does not exist.
        """
        length, columns, meta = self._content()
        if keys is not None:
            everything = columns.get(ALL)
            if isinstance(everything, Remote):
                named = [keys] if isinstance(keys, str) else list(keys)
                columns = {name: columns[name] if name in columns else Remote(everything.rows, name) for name in named}
            else:
                columns = {name: columns[name] for name in self._chosen(keys)}
        if meta_info_keys is not None:
            wanted = list(meta_info_keys)
            for key in wanted:
                if key not in meta:
                    raise missing(key, meta, "meta_info key")
            meta = {key: meta[key] for key in wanted}
        return self._of(length, columns, meta)

    def drop(self, keys: Keys) -> Self:
        """Return a batch without these columns; raise ``ColumnError`` if a column does not exist."""
        gone = set(self._chosen(keys))
        columns = {name: column for name, column in self._named().items() if name not in gone}
        return self._of(self._length, columns, self._meta)

    def rename(self, mapping: Mapping[str, str]) -> Self:
        """Return a batch with renamed columns, in the same order.

        Raises:
            ColumnError: a column to rename does not exist.
            DataProtoError: a new name is not a non-empty string, or two columns would have the same name.
        """
        self._chosen(mapping)
        renamed: dict[str, Column] = {}
        for old, column in self._named().items():
            new = mapping.get(old, old)
            if new in renamed:
                raise DataProtoError(f"rename: two columns would be called {new!r}")
            renamed[ops.check_name(new)] = column
        return self._of(self._length, renamed, self._meta)

    def joined(self, other: DataProto, overwrite: bool = False) -> Self:
        """Return a batch with the columns and meta of both batches, which must have equal lengths.

        Args:
            other: Another batch.
            overwrite: True to take columns and meta keys that both have from ``other``. Otherwise, their values must
                be equal; remote columns are not compared, because that would move them.

        Raises:
            DataProtoError: lengths differ, or a column or meta key differs; names it.
        """
        if not isinstance(other, DataProto):
            raise DataProtoError(
                f"joined: a {type(other).__name__} is not a DataProto; of a call in flight, select() the columns"
            )
        columns, more = self._named(), other._named()
        if len(self) != len(other):
            raise DataProtoError(f"joined: {len(self)} rows here but {len(other)} in the other")
        for name, column in () if overwrite else more.items():
            if name in columns and (why := _clash(name, columns[name], column)):
                raise DataProtoError(f"joined: {why}; drop or rename one, or pass overwrite=True")
        merged = merge_meta([self._meta, other._meta], "joined", overwrite=overwrite)
        return self._of(len(self), {**columns, **more}, merged)

    def with_columns(self, mapping: Mapping[str, Any] | None = None, /, **columns: Any) -> Self:
        """Return a batch with columns added or replaced; values are converted as in :meth:`from_single_dict`.

        For a DataProto without columns and rows, the new columns determine the length.
        """
        named = {**(mapping or {}), **columns}
        added = {name: ops.as_column(name, value) for name, value in named.items()}
        unset = not self._raw() and not len(self)
        length = ops.common_length(added, None if unset else len(self))
        return self._of(length, {**self._raw(), **added}, self._meta)

    # ---- selecting rows ----

    def _take(self, pick: Pick) -> Self:
        return self._of(pick.rows, remote.take(self._raw(), pick), self._meta)

    def select_idxs(self, idxs: Rows) -> Self:
        """Return the rows with these indices, in this order, or the rows where a mask ``[len]`` is True."""
        return self._take(picks.pick_index(idxs, len(self)))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Return the rows of a Python slice, as views if the step is positive."""
        return self._take(picks.pick_slice(slice(start, end, step), len(self)))

    def _spans(self, size: int) -> list[Self]:
        columns, length = self._raw(), len(self)
        local = {name: column for name, column in columns.items() if not isinstance(column, Remote)}
        if local and length and len(local) == len(columns):
            pieces = ops.split(local, length, size)
            return [self._of(min(size, length - i * size), piece, self._meta) for i, piece in enumerate(pieces)]
        starts = range(0, max(length, 1), size)
        return [self._take(picks.pick_slice(slice(start, start + size), length)) for start in starts]

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
        a rule for ``metrics``. No remote rows are fetched.

        Raises:
            DataProtoError: there are no members; their keys differ; a column differs in kind, dtype, row shape or
                device; or a meta key has different values and no rule. Names the column or key.
        """
        if not members:
            raise DataProtoError("concat: the list is empty, so the columns are unknown")
        for member in members:
            if not isinstance(member, DataProto):
                raise DataProtoError(f"concat: a member is a {type(member).__name__}, not a DataProto")
        if len({frozenset(member._raw()) for member in members}) > 1:
            for member in members:
                member._named()
        contents = [member._content() for member in members]
        first = contents[0].columns
        for position, content in enumerate(contents):
            if odd := sorted(content.columns.keys() ^ first.keys()):
                raise DataProtoError(
                    f"concat: columns {odd} are not in both member 0 and member {position};"
                    " select or drop columns so that all members have the same"
                )
        meta = merge_meta([content.meta_info for content in contents], "concat", rules=meta_rules)
        columns = remote.concat([content.columns for content in contents])
        kind = type(members[0])
        return (cls if issubclass(cls, kind) else kind)._of(sum(content.length for content in contents), columns, meta)

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
        picks.check_count("make_iterator: mini_batch_size", mini_batch_size)
        picks.check_count("make_iterator: epochs", epochs, minimum=0)
        picks.require_divisible("make_iterator", len(self), mini_batch_size, "rows each")
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
        return self._of(self._length, ops.map_tensors(self._columns(), lambda x: x.to(device)), self._meta)

    def clone(self) -> Self:
        """Copy all tensors to new, writable storage; the objects in object columns are shared."""
        return self._of(self._length, ops.map_tensors(self._columns(), torch.clone), self._meta)

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
        return self._of(*self._content())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        columns = ops.map_tensors(self._columns(), lambda x: x.detach().clone(), lambda column: deepcopy(column, memo))
        return self._of(len(self), columns, deepcopy(self._meta, memo))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        columns = self._raw()
        away = remote.trimmed({name: column for name, column in columns.items() if isinstance(column, Remote)})
        local = {name: column for name, column in columns.items() if not isinstance(column, Remote)}
        header, buffers = _wire.pack(self._length, local, self._meta)
        sent = remote.to_send(buffers, protocol)
        return _from_wire, (type(self), header, sent, *([away, list(columns)] if away else []))

    # ---- remote columns ----

    def bound(self, fetch: Fetch) -> Self:
        """Return the batch, whose remote columns are read with ``fetch``."""
        return self._of(self._length, remote.bind(self._raw(), fetch), self._meta)

    def with_cached(self, **columns: torch.Tensor) -> Self:
        """Return the batch with the values of remote columns that this process has, so that they are not fetched.

        The columns stay remote: to other processes they are sent as references.
        """
        batch = self._of(*self._content())
        for name, value in columns.items():
            column = batch._raw()[name]
            if isinstance(column, Remote):
                column.rows.remember(column.source, value)
        return batch

    @classmethod
    def of_calls(cls, rows: RowMap) -> Self:
        """Return a batch of the results of calls in flight; its columns are known when the calls have ended."""
        return cls._of(len(rows), {ALL: Remote(rows, ALL)}, None)

    def settled(self) -> Self:
        """Return the batch with the columns of awaited calls over the objects that the calls stored.

        Workers to which it is passed then need not ask for the results of these calls.
        """
        everything = self._raw().get(ALL)
        if isinstance(everything, Remote) and everything.rows.is_known:
            self._named()
        columns = dict(self._raw())
        in_flight = {ALL: columns.pop(ALL)} if ALL in columns else {}
        return self._of(self._length, {**in_flight, **remote.settle_known(columns)}, self._meta)

    @property
    def is_remote(self) -> bool:
        """True if a column is remote."""
        return any(isinstance(column, Remote) for column in self._raw().values())

    def calls(self) -> list[remote.Call]:
        """Return the calls in flight that compute remote columns."""
        rows = [column.rows for column in self._raw().values() if isinstance(column, Remote)]
        return list({id(call): call for row in rows for call in row.calls}.values())


def _results(rows: RowMap) -> tuple[dict[str, Remote], dict[str, Any]]:
    """Wait for the calls that ``rows`` are the results of; return the remote columns and the merged meta."""
    remote.await_calls([rows])
    results = list({id(piece.ref): piece.ref.description for piece in rows.pieces}.values())
    names = list(results[0].remote_columns())
    for result in results:
        if odd := sorted(set(result.remote_columns()) ^ set(names)):
            raise DataProtoError(f"concat: columns {odd} are not in all results of the call")
    meta = merge_meta([result.meta_info for result in results], "concat", rules=meta_rules)
    return remote.settle({name: Remote(rows, name) for name in names}), meta


def _clash(name: str, mine: Column, theirs: Column) -> str | None:
    """Return the reason why two columns of one name cannot be merged; None if they are equal."""
    if isinstance(mine, Remote) or isinstance(theirs, Remote):
        if isinstance(mine, Remote) and isinstance(theirs, Remote) and mine == theirs:
            return None
        return f"column {name!r} is in both, and whether the values are equal cannot be told without moving them"
    return None if ops.same_column(mine, theirs) else f"column {name!r} is in both with different values"


def _in_place(name: str, instead: str) -> DataProtoError:
    return DataProtoError(
        f"{name}() changes a batch in place in verl; here no operation does, and its dropped result would go"
        f" unnoticed: write `{instead}`"
    )


def _from_wire(
    cls: type[DataProto],
    header: _wire.Header,
    buffers: list[Any],
    away: Mapping[str, Remote] | None = None,
    order: Sequence[str] = (),
) -> DataProto:
    columns: dict[str, Column] = dict(_wire.unpack(header, buffers))
    if away is not None:
        columns |= away
        columns = {name: columns[name] for name in order}
    return cls._of(header.length, columns, header.meta_info)


def store_batch(data: DataProto, put: Callable[[Any], Any]) -> DataProto:
    """Store the columns of a batch as one object, and return the batch with remote columns in their place.

    Args:
        put: Function that stores a :class:`StoredBatch` and returns a reference to it.
    """
    length, columns, meta = data._content()
    local = {name: column for name, column in columns.items() if not isinstance(column, Remote)}
    if not local:
        return data
    stored = remote.describe(length, local, put(StoredBatch(length, local)))
    return type(data)._of(length, {**columns, **stored}, meta)


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
