"""DataProto: the batch that every stage of training reads and returns, and its operations."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import numpy as np
import torch

from rollcast.errors import DataProtoError
from rollcast.protocol import columns as ops
from rollcast.protocol import storage
from rollcast.protocol.base import BatchBase
from rollcast.protocol.rows import Pick, pick_index, pick_slice
from rollcast.protocol.sizes import check_count, padding_rows, require_divisible
from rollcast.protocol.values import merge_meta

if TYPE_CHECKING:
    from rollcast.protocol.future import DataProtoFuture

Keys = Iterable[str]


class DataProto(BatchBase):
    """Rows of tensors, jagged tensors and Python objects, and a small dict about all of them.

    All columns live in one ``TensorDict`` with batch size ``[len]``. Every operation returns a new
    DataProto and leaves this one as it is; the new one may share tensor storage, and never shares
    ``meta_info`` or any container in it. Two ways to change a DataProto are kept for code that was
    written for verl: assigning to ``.batch[key]`` or ``.non_tensor_batch[key]``, and editing its
    own ``.meta_info``.

    Columns that came over the wire may lie in shared read-only memory: ``clone()`` before writing
    into a tensor in place. Gradients do not travel.

    Args:
        batch: tensor columns, or a TensorDict with columns of any kind; its nested tensors must be
            jagged in dimension 1, its batch size is cut to the first dimension.
        non_tensor_batch: object columns: arrays or lists with one object per row.
        meta_info: copied, down to the containers in it.
        length: the number of rows, needed only where there are no columns to tell it.

    Raises:
        DataProtoError: columns differ in length or have none; names the column and the lengths.
    """

    __slots__ = ()

    # ---- choosing columns ----

    def _named(self, keys: Keys | str) -> list[str]:
        names = [keys] if isinstance(keys, str) else list(keys)
        for name in names:
            if name not in self:
                raise ops.missing(name, self.keys())
        return names

    def select(self, keys: Keys | str | None = None, meta_info_keys: Iterable[str] | None = None) -> Self:
        """Only these columns, of any kind, and these meta keys; ``None`` keeps all of them.

        Raises:
            ColumnError: a column or meta key is not there.
        """
        names = self.keys() if keys is None else self._named(keys)
        columns = self._columns()
        meta = self.meta_info
        if meta_info_keys is not None:
            wanted = list(meta_info_keys)
            for key in wanted:
                if key not in meta:
                    raise ops.missing(key, meta, "meta_info key")
            meta = {key: meta[key] for key in wanted}
        return self._of({name: columns[name] for name in names}, len(self), meta)

    def drop(self, keys: Keys | str) -> Self:
        """All columns but these; raises ``ColumnError`` for one that is not there."""
        gone = set(self._named(keys))
        return self._with({k: column for k, column in self._columns().items() if k not in gone})

    def pop(self, keys: Keys | str) -> tuple[Self, Self]:
        """``(rest, taken)``: :meth:`drop` and :meth:`select`; both have all of the meta."""
        names = self._named(keys)
        return self.drop(names), self.select(names)

    def rename(self, mapping: Mapping[str, str]) -> Self:
        """Columns under new names, in their old places.

        Raises:
            ColumnError: an old name is not there.
            DataProtoError: two columns would have one name.
        """
        self._named(mapping)
        renamed: ops.Columns = {}
        for old, column in self._columns().items():
            new = mapping.get(old, old)
            if new in renamed:
                raise DataProtoError(f"rename: two columns would be called {new!r}")
            renamed[new] = ops.as_column(new, column)
        return self._with(renamed)

    def with_columns(self, mapping: Mapping[str, Any] | None = None, /, **columns: Any) -> Self:
        """These columns added or replaced; values as in :meth:`from_single_dict`.

        A DataProto without columns and rows takes the length of the new columns.
        """
        given = {**(mapping or {}), **columns}
        added = {name: ops.as_column(name, value) for name, value in given.items()}
        unset = not self.keys() and not len(self)
        length = ops.common_length(added, None if unset else len(self))
        return self._of({**self._columns(), **added}, length, self.meta_info)

    def union(self, other: DataProto, overwrite: bool = False) -> Self:
        """The columns and meta of both, which have one length.

        Args:
            overwrite: take columns and meta keys that both have from ``other``; otherwise their
                values must be equal.

        Raises:
            DataProtoError: lengths differ, or a column or meta key differs; names it.
        """
        if len(self) != len(other):
            raise DataProtoError(f"union: {len(self)} rows here but {len(other)} in the other")
        columns = self._columns()
        for name, column in other._columns().items():
            if not overwrite and name in columns and not ops.same_column(columns[name], column):
                raise DataProtoError(
                    f"union: column {name!r} is in both with different values; drop or rename one,"
                    " or pass overwrite=True"
                )
            columns[name] = column
        meta = merge_meta([self.meta_info, other.meta_info], "union", overwrite=overwrite)
        return self._of(columns, len(self), meta)

    # ---- choosing rows ----

    def select_idxs(self, idxs: Sequence[int] | Sequence[bool] | torch.Tensor | np.ndarray) -> Self:
        """The rows of these numbers, in this order, or where a mask ``[len]`` is true."""
        return self._take(pick_index(idxs, len(self)))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """The rows of a Python slice; views of this one's storage for a positive step."""
        return self._take(pick_slice(slice(start, end, step), len(self)))

    def _spans(self, size: int) -> list[Self]:
        columns = self._columns()
        length = len(self)
        found = []
        for start in range(0, max(length, 1), size):
            pick = pick_slice(slice(start, start + size), length)
            found.append(self._of(ops.take_rows(columns, pick), pick.rows, self.meta_info))
        return found

    def chunk(self, chunks: int) -> list[Self]:
        """``chunks`` parts of equal length, as views, in order; empty ones if there are no rows.

        Raises:
            DataProtoError: ``chunks`` does not divide the length; names lengths that fit.
        """
        require_divisible("chunk", len(self), check_count("chunk: chunks", chunks), "chunks")
        if not len(self):
            return [self.slice() for _ in range(chunks)]
        return self._spans(len(self) // chunks)

    def split(self, size: int) -> list[Self]:
        """Parts of ``size`` rows, as views; the last may be shorter, and there is at least one."""
        return self._spans(check_count("split: size", size))

    @overload
    @staticmethod
    def concat(members: Sequence[DataProto]) -> DataProto: ...

    @overload
    @staticmethod
    def concat(members: Sequence[DataProtoFuture]) -> DataProtoFuture: ...

    @staticmethod
    def concat(members: Sequence[Any]) -> Any:
        """The rows of all members, in order. Columns come in the order of the first.

        Handles among the members make it a handle; nothing moves then.

        Raises:
            DataProtoError: no members; keys differ; a column differs in kind, dtype, row shape or
                device; a meta key has different values. Names the column or key.
        """
        if not members:
            raise DataProtoError("concat: the list is empty, so the columns are unknown")
        other = next((type(member) for member in members if not isinstance(member, DataProto)), None)
        if other is not None:
            if not hasattr(other, "concat"):
                raise DataProtoError(f"concat: a member is a {other.__name__}, not a DataProto")
            return other.concat(members)
        parts = [member._columns() for member in members]
        for position, part in enumerate(parts):
            if odd := sorted(part.keys() ^ parts[0].keys()):
                raise DataProtoError(
                    f"concat: columns {odd} are not in both member 0 and member {position};"
                    " select or drop columns so that all members have the same"
                )
        meta = merge_meta([member.meta_info for member in members], "concat")
        return DataProto._of(ops.concat_columns(parts), sum(map(len, members)), meta)

    def repeat(self, times: int, interleave: bool = True) -> Self:
        """Every row ``times`` times: ``aabb`` if interleaved, ``abab`` if not."""
        check_count("repeat: times", times, minimum=0)
        rows = torch.arange(len(self))
        index = rows.repeat_interleave(times) if interleave else rows.repeat(times)
        return self._take(Pick(None, index, index.numel()))

    def reorder(self, indices: Sequence[int] | torch.Tensor | np.ndarray) -> Self:
        """The rows in the order of ``indices [len]``, in which each row number is there once.

        Raises:
            DataProtoError: ``indices`` is no permutation; for other choices use ``select_idxs``.
        """
        pick = pick_index(indices, len(self))
        counts = torch.bincount(pick.as_index(torch.device("cpu")), minlength=len(self))
        if pick.rows != len(self) or not bool((counts == 1).all()):
            raise DataProtoError(
                f"reorder: {pick.rows} indices are no permutation of {len(self)} rows; use"
                " select_idxs() to repeat or leave out rows"
            )
        return self._take(pick)

    def pad_to_divisor(self, divisor: int, mode: Literal["last", "first", "cycle"] = "last") -> tuple[Self, int]:
        """``(padded, pad_size)``: rows added at the end until ``divisor`` divides the length.

        Args:
            mode: what is added: the last row, the first row, or all rows in turn.

        No rows are padded to no rows. :meth:`unpad` takes the added rows off again.
        """
        index, pad_size = padding_rows(len(self), check_count("pad: divisor", divisor), mode)
        if not pad_size:
            return self.slice(), 0
        return self._take(Pick(None, index, index.numel())), pad_size

    def unpad(self, pad_size: int) -> Self:
        """Without the last ``pad_size`` rows, as views."""
        if check_count("unpad: pad_size", pad_size, minimum=0) > len(self):
            raise DataProtoError(f"unpad: {pad_size} rows cannot be taken off {len(self)}")
        return self.slice(0, len(self) - pad_size)

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int = 1,
        generator: torch.Generator | None = None,
        shuffle: bool = False,
    ) -> Iterator[Self]:
        """Mini-batches of ``mini_batch_size`` rows; each epoch has every row once.

        Args:
            generator: the CPU source of the order; without it torch's global one.
            shuffle: a new order in each epoch.

        Raises:
            DataProtoError: at the call, if the size does not divide the length.
        """
        check_count("make_iterator: mini_batch_size", mini_batch_size)
        check_count("make_iterator: epochs", epochs, minimum=0)
        require_divisible("make_iterator", len(self), mini_batch_size, "rows each")
        if generator is not None and not shuffle:
            raise DataProtoError("make_iterator: a generator without shuffle=True has no effect")

        def iterate(rows: Self) -> Iterator[Self]:
            for _ in range(epochs):
                if not len(rows):
                    return
                order = torch.randperm(len(rows), generator=generator) if shuffle else None
                for start in range(0, len(rows), mini_batch_size):
                    end = start + mini_batch_size
                    yield rows.slice(start, end) if order is None else rows[order[start:end]]

        # A copy, so that columns assigned to this one between two steps do not appear halfway.
        return iterate(self.slice())

    # ---- storage and the wire ----

    def to(self, device: torch.device | str) -> Self:
        """All tensors on ``device`` (shared where they are there already); objects stay."""
        return self._with(ops.move(self._columns(), device))

    def clone(self) -> Self:
        """Tensors with their own, writable storage; the objects in object columns are shared."""
        return self._with(ops.clone(self._columns()))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a file, without pickle; an existing file is replaced in one step.

        Tuples and other objects that JSON would change are refused; numpy scalars in object
        columns and meta come back as Python's.

        Raises:
            DataProtoError: an object column or meta key is not JSON; names it.
        """
        storage.save(path, self._columns(), len(self), self.meta_info)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file of :meth:`save`; all tensors are on the CPU.

        Raises:
            DataProtoError: the file is of another kind, cut short or damaged.
        """
        return cls._of(*storage.load(path))
