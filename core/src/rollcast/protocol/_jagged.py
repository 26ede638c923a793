"""Operations on jagged columns ``[B, ragged, ...]`` through their values and offsets.

Torch's own indexing and joining of jagged tensors has gaps that differ between releases. Row ``i`` of a
column is ``values[offsets[i]:offsets[i + 1]]``; offsets are int64 ``[B + 1]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollcast.protocol import _memory as memory
from rollcast.protocol._rows import Pick


def build(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the jagged tensor over ``values [total, ...]`` and ``offsets [B + 1]``, without a copy."""
    found: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, offsets)
    return found


def offsets_of(column: torch.Tensor) -> torch.Tensor:
    """Return the offsets ``[B + 1]`` of a jagged tensor; each call returns the same object."""
    offsets: torch.Tensor = column.offsets()  # type: ignore[attr-defined]
    return offsets


def _offsets_from(lengths: torch.Tensor) -> torch.Tensor:
    offsets = lengths.new_zeros(lengths.numel() + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def canonical(column: torch.Tensor) -> torch.Tensor:
    """Return a nested tensor as jagged in dimension 1, without gaps between rows.

    Raises:
        ValueError: another dimension is ragged, or more than one.
    """
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
    values, offsets = column.values(), offsets_of(column)
    lengths_or_none = column.lengths()  # type: ignore[attr-defined]
    if lengths_or_none is None and offsets.dtype == torch.int64:
        return column
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
    """Return the picked rows: a view of the values for adjacent rows, else a copy."""
    values, offsets = column.values(), offsets_of(column)
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
    """Return ``(values, offsets)`` without values before the first or behind the last row; views."""
    values, offsets = column.values(), offsets_of(column)
    start, stop = offsets[[0, -1]].tolist()
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
