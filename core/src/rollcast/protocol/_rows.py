"""Row selection: conversion of selectors to a slice or an index tensor, and checks of counts."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch

from rollcast.errors import DataProtoError

Rows: TypeAlias = "Sequence[int] | Sequence[bool] | torch.Tensor | np.ndarray"
RowSelector: TypeAlias = "int | slice | Rows"
CPU = torch.device("cpu")


class RowIndexError(DataProtoError, IndexError):
    """An error for a row number out of range."""


class Pick:
    """A resolved row selection, which can be applied to every column of a batch.

    Attributes:
        span: ``slice`` with a start, a stop and a positive step, or ``None``.
        index: int64 CPU tensor ``[rows]``, all values in range; ``None`` if ``span`` is set.
        rows: Number of selected rows.
        ragged: Cache of results by the ``id`` of a jagged offsets tensor. It keeps offsets shared between columns
            that shared them before, because torch can combine two jagged tensors only if they share offsets.
    """

    __slots__ = ("_moved", "index", "ragged", "rows", "span")

    def __init__(self, span: slice | None, index: torch.Tensor | None, rows: int) -> None:
        self.span = span
        self.index = index
        self.rows = rows
        self.ragged: dict[int, tuple[torch.Tensor, ...]] = {}
        self._moved: dict[torch.device, torch.Tensor] = {}

    def as_index(self, device: torch.device = CPU) -> torch.Tensor:
        """Return the row numbers as an int64 tensor ``[rows]`` on ``device``."""
        if self.index is None:
            span = self.span or slice(0, 0, 1)
            self.index = torch.arange(span.start, span.stop, span.step)
        if device.type == "cpu":
            return self.index
        if device not in self._moved:
            self._moved[device] = self.index.to(device)
        return self._moved[device]


def pick_slice(selector: slice, length: int) -> Pick:
    """Resolve a slice against ``length`` rows; a negative step becomes an index."""
    try:
        start, stop, step = selector.indices(length)
    except (TypeError, ValueError) as error:
        raise DataProtoError(f"{selector} is no slice of {length} rows: {error}") from error
    rows = len(range(start, stop, step))
    # The stop of an empty range may be below its start, which neither branch below accepts.
    if step < 0:
        return Pick(None, torch.arange(start, min(start, stop), step), rows)
    return Pick(slice(start, max(start, stop), step), None, rows)


def _to_tensor(selector: Rows) -> torch.Tensor:
    if isinstance(selector, torch.Tensor):
        return selector.detach().cpu()
    array = np.asarray(selector)
    if array.size == 0 and array.dtype.kind == "f":
        array = array.astype(np.int64)  # numpy converts [] to a float array
    if array.dtype.kind not in "biu":
        raise DataProtoError(
            f"rows are chosen by integers or booleans, not by {type(selector).__name__} of"
            f" {array.dtype}; to choose columns use select()"
        )
    return torch.from_numpy(array.astype(bool if array.dtype.kind == "b" else np.int64))


def pick_index(selector: Rows, length: int) -> Pick:
    """Resolve row numbers or a boolean mask against ``length`` rows.

    Raises:
        DataProtoError: the selector is not one-dimensional, is neither integer nor boolean, or is a mask of another
            length.
        RowIndexError: a row number is outside ``[-length, length)``.
    """
    index = _to_tensor(selector)
    if index.dim() != 1:
        raise DataProtoError(f"rows are chosen by one dimension, got shape {tuple(index.shape)}")
    if index.dtype == torch.bool:
        if index.numel() != length:
            raise DataProtoError(
                f"the boolean mask has {index.numel()} values but the DataProto has {length} rows;"
                " give one value per row"
            )
        index = index.nonzero().flatten()
    elif index.is_floating_point() or index.is_complex():
        raise DataProtoError(f"rows are chosen by integers or booleans, not by {index.dtype}")
    index = index.to(torch.int64)
    if index.numel():
        low, high = int(index.min()), int(index.max())
        if low < -length or high >= length:
            raise RowIndexError(f"row {low if low < -length else high} is out of range for {length} rows")
        if low < 0:
            index = torch.where(index < 0, index + length, index)
    return Pick(None, index, index.numel())


def pick_rows(selector: RowSelector, length: int) -> Pick:
    """Resolve any selector against ``length`` rows; an ``int`` picks one row."""
    if isinstance(selector, slice):
        return pick_slice(selector, length)
    if isinstance(selector, torch.Tensor | np.ndarray) and selector.ndim:
        return pick_index(selector, length)
    if isinstance(selector, Sequence) and not isinstance(selector, str | bytes):
        return pick_index(selector, length)
    try:
        row = operator.index(selector)  # type: ignore[arg-type]
    except TypeError as error:
        raise DataProtoError(
            f"a DataProto is indexed by a column name, an int, a slice or a list, array or tensor"
            f" of ints or booleans, not by {type(selector).__name__}"
        ) from error
    if not -length <= row < length:
        raise RowIndexError(f"row {row} is out of range for {length} rows")
    row %= length
    return Pick(slice(row, row + 1, 1), None, 1)


def pick_permutation(indices: Rows, length: int) -> Pick:
    """Resolve a permutation of ``length`` rows; any other index raises ``DataProtoError``."""
    pick = pick_index(indices, length)
    if pick.rows != length or not bool((torch.bincount(pick.as_index(), minlength=length) == 1).all()):
        raise DataProtoError(
            f"reordered: {pick.rows} indices are no permutation of {length} rows;"
            " use select_idxs() to repeat or leave out rows"
        )
    return pick


def pick_repeated(length: int, times: int, interleave: bool) -> Pick:
    """Pick every row ``times`` times: ``aabb`` if interleaved, else ``abab``."""
    rows = torch.arange(length)
    index = rows.repeat_interleave(times) if interleave else rows.repeat(times)
    return Pick(None, index, index.numel())


def pick_padded(length: int, divisor: int, mode: str) -> tuple[Pick, int]:
    """Return the pick that pads ``length`` rows to a multiple of ``divisor``, and the number of added rows."""
    pad_size = -length % divisor if length else 0
    rows = torch.arange(length)
    if mode not in ("last", "first", "cycle"):
        raise DataProtoError(f"pad: mode is 'last', 'first' or 'cycle', not {mode!r}")
    if not pad_size:
        return pick_slice(slice(None), length), 0
    if mode == "cycle":
        added = torch.arange(pad_size) % length
    else:
        added = (rows[-1:] if mode == "last" else rows[:1]).expand(pad_size)
    return Pick(None, torch.cat([rows, added]), length + pad_size), pad_size


def check_count(what: str, value: int, minimum: int = 1) -> int:
    """Return ``value`` if it is an int of at least ``minimum``, else raise ``DataProtoError``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise DataProtoError(f"{what} must be an int of at least {minimum}, not {value!r}")
    return value


def require_divisible(operation: str, length: int, value: int, unit: str) -> None:
    """Raise ``DataProtoError`` unless ``value`` divides ``length``; the error names the nearest valid sizes."""
    if length % value == 0:
        return
    divisors = [n for n in range(1, length + 1) if length % n == 0]
    fitting = [n for n in divisors if n < value][-1:] + [n for n in divisors if n > value][:1]
    below = length // value * value
    lengths = [str(n) for n in (below, below + value) if n]
    raise DataProtoError(
        f"{operation}: {length} rows cannot be cut in {value} {unit}; the nearest that fit are"
        f" {' and '.join(map(str, fitting))} {unit}, or"
        f" {' and '.join(lengths)} rows (pad_to_divisor({value}) makes {below + value})"
    )
