"""Operations on jagged columns ``[B, ragged, ...]`` through their values and offsets.

Torch's own indexing and joining of jagged tensors is incomplete in ways that differ between releases. Row ``i`` of a
column is ``values[offsets[i]:offsets[i + 1]]``; offsets are int64 ``[B + 1]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

# Torch's public constructor and accessors go through its dispatcher and take 50 to 200 us each, and a training step
# builds and reads hundreds of columns. The class and its two private attributes have been stable since torch 2.3.
# Autograd does not track columns that are built and read this way; batches carry no gradients anyway.
from torch.nested._internal.nested_tensor import NestedTensor

from rollcast.errors import DataProtoError
from rollcast.protocol import _memory as memory
from rollcast.protocol._rows import Pick

__all__ = ["Jagged"]


def is_jagged(column: object) -> bool:
    """Return True if ``column`` is a jagged tensor."""
    return type(column) is NestedTensor


def build(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Build a jagged tensor from ``values [total, ...]`` and ``offsets [B + 1]``, without copying."""
    if values.requires_grad:
        nested: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, offsets)
        return nested
    return NestedTensor(values, offsets)


def offsets_of(column: torch.Tensor) -> torch.Tensor:
    """Return the offsets ``[B + 1]`` of a jagged tensor; each call returns the same object."""
    offsets: torch.Tensor = column._offsets  # type: ignore[attr-defined]
    return offsets


def values_of(column: torch.Tensor) -> torch.Tensor:
    """Return the values ``[total, ...]`` of a jagged tensor."""
    values: torch.Tensor = vars(column)["_values"]  # torch.Tensor declares a method of this name
    return values


@dataclass(frozen=True)
class Jagged:
    """The flat form of a jagged column: row ``i`` is ``values[offsets[i] : offsets[i + 1]]``.

    Compute on ``values`` to work on tokens without padding. Columns of a batch for the same tokens share their offsets,
    so their values are aligned::

        responses, mask = Jagged.of(batch["responses"]), Jagged.of(batch["response_mask"])
        lengths = mask.sums()                                     # int64 [B]
        batch = batch.with_columns({"scores": mask.like(mask.values.float())})

    Attributes:
        values: All rows, concatenated, ``[N, ...]``.
        offsets: Start of each row and the end of the last row, int64 ``[B + 1]``, from 0 to N.
    """

    values: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def of(cls, column: torch.Tensor, name: str = "") -> Jagged:
        """Return the flat form of a jagged tensor, without copying.

        Args:
            name: Name of the column, for the error.

        Raises:
            DataProtoError: the column is not jagged.
        """
        if not is_jagged(column):
            what = f"{column.dtype} {list(column.shape)}" if isinstance(column, torch.Tensor) else type(column).__name__
            label = f"column {name!r}" if name else "the column"
            raise DataProtoError(
                f"{label} is {what}, but a jagged column is needed, with one row of tokens of its own length for each "
                "row of the batch; Jagged.from_padded makes one of a padded tensor and its mask"
            )
        return cls(*trimmed(column))

    @classmethod
    def from_lengths(cls, values: torch.Tensor, lengths: torch.Tensor) -> Jagged:
        """Divide ``values`` ``[N, ...]`` into rows of ``lengths``, int64 ``[B]`` with sum N."""
        if int(lengths.sum()) != len(values):
            raise DataProtoError(
                f"rows of {int(lengths.sum())} values in all cannot be cut out of {len(values)} values"
            )
        return cls(values, _offsets_from(lengths))

    @classmethod
    def from_padded(cls, padded: torch.Tensor, mask: torch.Tensor) -> Jagged:
        """Collect the values of ``padded`` ``[B, W, ...]`` where ``mask`` ``[B, W]`` is not 0, in order."""
        chosen = mask != 0
        return cls(padded[chosen], _offsets_from(chosen.sum(-1)))

    @cached_property
    def lengths(self) -> torch.Tensor:
        """Length of each row, int64 ``[B]``."""
        return self.offsets.diff()

    @cached_property
    def rows(self) -> torch.Tensor:
        """Row index of each value, int64 ``[N]``."""
        return torch.repeat_interleave(self.lengths, output_size=len(self.values))

    @cached_property
    def places(self) -> torch.Tensor:
        """Position of each value within its row, int64 ``[N]``."""
        return torch.arange(len(self.values), device=self.offsets.device) - self.offsets[self.rows]

    def with_values(self, values: torch.Tensor) -> Jagged:
        """Return rows of the same lengths with other values ``[N, ...]``."""
        return replace(self, values=values)

    def column(self) -> torch.Tensor:
        """Return the jagged tensor; torch can combine jagged tensors that share the ``offsets`` object."""
        return build(self.values, self.offsets)

    def like(self, values: torch.Tensor) -> torch.Tensor:
        """Return a jagged tensor with other values ``[N, ...]`` in rows of the same lengths."""
        return build(values, self.offsets)

    def sums(self) -> torch.Tensor:
        """Return the sum of each row, ``[B]``; int64 for integers and bools."""
        counted = self.values if self.values.is_floating_point() else self.values.long()
        return counted.new_zeros(len(self.offsets) - 1).index_add_(0, self.rows, counted)

    def take(self, rows: torch.Tensor) -> Jagged:
        """Return a copy of the rows with these indices (int64), in this order."""
        picked = self.positions(rows)
        return picked.with_values(memory.index_select(self.values, picked.values))

    def positions(self, rows: torch.Tensor) -> Jagged:
        """Return the int64 positions in ``values`` of the values of these rows (int64)."""
        starts = self.offsets.index_select(0, rows)
        return Jagged(*_gather_plan(starts, self.offsets.index_select(0, rows + 1) - starts))

    def pad(self, width: int | None = None, value: float = 0, left: bool = False) -> torch.Tensor:
        """Pad the rows to ``[B, width, ...]`` with ``value``, on the right, or on the left if ``left``.

        Args:
            width: Width of the result, at least the length of the longest row, which is the default.

        Raises:
            DataProtoError: a row is longer than ``width``.
        """
        count = len(self.offsets) - 1
        longest = int(self.lengths.max()) if count else 0
        if width is None:
            width = longest
        elif width < longest:
            raise DataProtoError(f"a row of {longest} values cannot be padded to {width}")
        padded = self.values.new_full((count * width, *self.values.shape[1:]), value)
        places = self.rows * width + self.places
        if left:
            places = places + (width - self.lengths)[self.rows]
        return padded.index_copy_(0, places, self.values).view(count, width, *self.values.shape[1:])


def _offsets_from(lengths: torch.Tensor) -> torch.Tensor:
    offsets = lengths.new_zeros(lengths.numel() + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def canonical(column: torch.Tensor) -> torch.Tensor:
    """Convert a nested tensor to one that is jagged in dimension 1, without gaps between rows.

    Raises:
        ValueError: a dimension other than 1, or more than one dimension, is ragged.
    """
    has_no_gaps = is_jagged(column) and column._ragged_idx == 1 and column._lengths is None  # type: ignore[attr-defined]
    if has_no_gaps and offsets_of(column).dtype == torch.int64:
        return column
    if column.layout != torch.jagged:
        members = list(column.unbind())
        if any(m.dim() == 0 or m.shape[1:] != members[0].shape[1:] for m in members):
            raise ValueError("its rows may differ in their first dimension only")
        lengths = torch.tensor([m.shape[0] for m in members], dtype=torch.int64)
        values = torch.cat(members) if members else column.new_zeros(0)
        return build(values, _offsets_from(lengths).to(values.device))
    ragged = next(i for i, size in enumerate(column.shape) if not isinstance(size, int))
    if ragged != 1:
        raise ValueError(f"its dimension {ragged} is ragged, only dimension 1 may be")
    values, offsets = values_of(column), offsets_of(column)
    lengths_or_none = column.lengths()  # type: ignore[attr-defined]
    starts = offsets[: column.shape[0]].to(torch.int64)
    lengths = offsets.diff() if lengths_or_none is None else lengths_or_none
    positions, packed = _gather_plan(starts, lengths.to(torch.int64))
    return build(values.index_select(0, positions), packed)


def _gather_plan(starts: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of the values of rows at ``starts`` with ``lengths``, and their new offsets."""
    offsets = _offsets_from(lengths)
    shift = torch.repeat_interleave(starts - offsets[:-1], lengths)
    return shift + torch.arange(shift.numel(), device=shift.device), offsets


def take(column: torch.Tensor, pick: Pick) -> torch.Tensor:
    """Return the picked rows, as a view of the values if they are adjacent, else as a copy."""
    values, offsets = values_of(column), offsets_of(column)
    span = pick.span
    if span is not None and span.step == 1:
        if id(offsets) not in pick.ragged:
            window = offsets[span.start : span.stop + 1]
            pick.ragged[id(offsets)] = (window - window[0], window[[0, -1]].cpu())
        packed, ends = pick.ragged[id(offsets)]
        start, stop = ends.tolist()
        return build(values[start:stop], packed)
    if id(offsets) not in pick.ragged:
        index = pick.as_index(offsets.device)
        starts = offsets.index_select(0, index)
        pick.ragged[id(offsets)] = _gather_plan(starts, offsets.index_select(0, index + 1) - starts)
    positions, packed = pick.ragged[id(offsets)]
    return build(memory.index_select(values, positions), packed)


def trimmed(column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views ``(values, offsets)`` without the values before the first row or after the last row."""
    values, offsets = values_of(column), offsets_of(column)
    start, stop = int(offsets[0]), int(offsets[-1])
    if start == 0 and stop == len(values):
        return values, offsets
    if start:
        offsets = offsets - start
    return values[start:stop], offsets


def concat(columns: Sequence[torch.Tensor], ragged: dict[tuple[int, ...], torch.Tensor]) -> torch.Tensor:
    """Join the rows of all columns.

    Args:
        ragged: Joined offsets by the ``id`` of their sources, so that columns that share offsets keep
            sharing them.
    """
    key = tuple(id(offsets_of(column)) for column in columns)
    if key not in ragged:
        ragged[key] = _offsets_from(torch.cat([offsets_of(column).diff() for column in columns]))
    return build(memory.concat([trimmed(column)[0] for column in columns]), ragged[key])
