"""Which rows an operation takes: selectors of all kinds become a slice or an index tensor."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch

from rollcast.errors import DataProtoError

RowSelector: TypeAlias = "int | slice | Sequence[int] | Sequence[bool] | torch.Tensor | np.ndarray"


class RowIndexError(DataProtoError, IndexError):
    """A row that was asked for is not in the DataProto."""


class Pick:
    """A resolved choice of rows, applied to every column of one DataProto.

    Attributes:
        span: ``slice`` with a start, a stop and a positive step, or ``None``.
        index: int64 CPU tensor ``[rows]``, all values in range; ``None`` where ``span`` is set.
        rows: how many rows are taken.
        ragged: what jagged columns have worked out for their offsets, by ``id`` of the offsets.
            Columns that share offsets before an operation share them after it, because torch
            computes across two jagged tensors only if they do.
    """

    __slots__ = ("_moved", "index", "ragged", "rows", "span")

    def __init__(self, span: slice | None, index: torch.Tensor | None, rows: int) -> None:
        self.span = span
        self.index = index
        self.rows = rows
        self.ragged: dict[int, tuple[torch.Tensor, ...]] = {}
        self._moved: dict[torch.device, torch.Tensor] = {}

    def as_index(self, device: torch.device) -> torch.Tensor:
        """The rows as an int64 tensor ``[rows]`` on ``device``."""
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
    # An empty range may come with its stop on the wrong side, which neither of these accepts.
    if step < 0:
        return Pick(None, torch.arange(start, min(start, stop), step), rows)
    return Pick(slice(start, max(start, stop), step), None, rows)


def _mask_to_index(mask: torch.Tensor, length: int) -> torch.Tensor:
    if mask.numel() != length:
        raise DataProtoError(
            f"the boolean mask has {mask.numel()} values but the DataProto has {length} rows; give one value per row"
        )
    return mask.nonzero().flatten()


def _to_tensor(
    selector: Sequence[int] | Sequence[bool] | torch.Tensor | np.ndarray,
) -> torch.Tensor:
    if isinstance(selector, torch.Tensor):
        return selector.detach().cpu()
    array = np.asarray(selector)
    if array.size == 0 and array.dtype.kind == "f":
        array = array.astype(np.int64)  # numpy takes [] for floats
    if array.dtype.kind not in "biu":
        raise DataProtoError(
            f"rows are chosen by integers or booleans, not by {type(selector).__name__} of"
            f" {array.dtype}; to choose columns use select()"
        )
    return torch.from_numpy(array.astype(bool if array.dtype.kind == "b" else np.int64))


def pick_index(selector: Sequence[int] | Sequence[bool] | torch.Tensor | np.ndarray, length: int) -> Pick:
    """Resolve a list, array or tensor of row numbers or booleans against ``length`` rows.

    Raises:
        DataProtoError: not one-dimensional, not integer or boolean, or a mask of another length.
        RowIndexError: a row number outside ``[-length, length)``.
    """
    index = _to_tensor(selector)
    if index.dim() != 1:
        raise DataProtoError(f"rows are chosen by one dimension, got shape {tuple(index.shape)}")
    if index.dtype == torch.bool:
        index = _mask_to_index(index, length)
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
    """Resolve any selector against ``length`` rows; an ``int`` takes one row."""
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
