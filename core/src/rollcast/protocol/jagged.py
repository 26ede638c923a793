"""Jagged columns ``[B, ragged, ...]``, worked on through their values and offsets.

Torch's own indexing and joining of jagged tensors has gaps that differ between releases. Rows
``i`` of a column are ``values[offsets[i]:offsets[i + 1]]``; offsets are int64 ``[B + 1]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollcast.protocol import memory
from rollcast.protocol.rows import Pick


def build(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The jagged tensor over ``values [total, ...]`` and ``offsets [B + 1]``; nothing is copied."""
    found: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, offsets)
    return found


def parts(column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(values, offsets)`` of a column made by :func:`canonical`."""
    return column.values(), offsets_of(column)


def offsets_of(column: torch.Tensor) -> torch.Tensor:
    """The offsets ``[B + 1]`` of a jagged tensor; each call gives the same object."""
    offsets: torch.Tensor = column.offsets()  # type: ignore[attr-defined]
    return offsets


def ragged_dim(column: torch.Tensor) -> int:
    """Which dimension of a jagged tensor has varying size."""
    return next(i for i, size in enumerate(column.shape) if not isinstance(size, int))


def _offsets_from(lengths: torch.Tensor) -> torch.Tensor:
    offsets = lengths.new_zeros(lengths.numel() + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def canonical(column: torch.Tensor) -> torch.Tensor:
    """A nested tensor as jagged, ragged in dimension 1, without gaps between rows.

    Raises:
        ValueError: it is ragged in another dimension, or in more than one.
    """
    if column.layout != torch.jagged:
        members = list(column.unbind())
        if any(m.dim() == 0 or m.shape[1:] != members[0].shape[1:] for m in members):
            raise ValueError("its rows may differ in their first dimension only")
        lengths = torch.tensor([m.shape[0] for m in members], dtype=torch.int64)
        values = torch.cat(members) if members else column.new_zeros(0)
        return build(values, _offsets_from(lengths).to(values.device))
    if ragged_dim(column) != 1:
        raise ValueError(f"its dimension {ragged_dim(column)} is ragged, only dimension 1 may be")
    values, offsets = parts(column)
    lengths_or_none = column.lengths()  # type: ignore[attr-defined]
    if lengths_or_none is None and offsets.dtype == torch.int64:
        return column
    starts = offsets[: column.shape[0]].to(torch.int64)
    lengths = offsets.diff() if lengths_or_none is None else lengths_or_none
    positions, packed = _gather_plan(starts, lengths.to(torch.int64))
    return build(values.index_select(0, positions), packed)


def _gather_plan(starts: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the values of rows at ``starts`` with ``lengths`` lie, and their new offsets."""
    offsets = _offsets_from(lengths)
    shift = torch.repeat_interleave(starts - offsets[:-1], lengths)
    return shift + torch.arange(shift.numel(), device=shift.device), offsets


def take(column: torch.Tensor, pick: Pick) -> torch.Tensor:
    """The picked rows: a view of the values for adjacent rows, a copy otherwise."""
    values, offsets = parts(column)
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
    """``(values, offsets)`` with nothing before the first or behind the last row; views."""
    values, offsets = parts(column)
    start, stop = offsets[[0, -1]].tolist()
    if start:
        offsets = offsets - start
    return values[start:stop], offsets


def concat(columns: Sequence[torch.Tensor], ragged: dict[tuple[int, ...], torch.Tensor]) -> torch.Tensor:
    """The rows of all columns, in order.

    Args:
        ragged: joined offsets by the ``id`` of what they were joined from, so that columns which
            share offsets keep sharing them.
    """
    key = tuple(id(offsets_of(column)) for column in columns)
    if key not in ragged:
        ragged[key] = _offsets_from(torch.cat([offsets_of(column).diff() for column in columns]))
    return build(memory.concat([trimmed(column)[0] for column in columns]), ragged[key])


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether both have the same row lengths; the values are compared by the caller."""
    return torch.equal(offsets_of(left).diff().cpu(), offsets_of(right).diff().cpu())
