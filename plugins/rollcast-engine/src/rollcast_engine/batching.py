"""Splitting a rank's rows into micro-batches, and restoring the order of their outputs.

Axes: ``B`` rows, ``P`` prompt and ``T`` response positions of the batch; a micro-batch of ``b`` rows keeps ``p <= P``
and ``t <= T`` of them, without the columns that are padding in all its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from rollcast.errors import CapabilityError, ConfigError
from rollcast.protocol import DataProto, Jagged, karmarkar_karp
from rollcast_engine._rows import MODEL_INPUTS, MicroBatch, PaddedRows, RaggedRows, Rows
from rollcast_engine.images import read_images
from rollcast_engine.transfer import move

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast.contracts.engine import ForwardSettings
    from rollcast_engine.images import MicroImages

__all__ = [
    "MODEL_INPUTS",
    "BatchPlan",
    "MicroBatch",
    "check_budget",
    "dummy_micro_batch",
    "plan_batch",
]


@dataclass(frozen=True)
class BatchPlan:
    """Assignment of rows to micro-batches.

    Attributes:
        source: the rank's rows.
        lengths: int64 ``[B]``, budgeted length of each row: its tokens if packed, else its positions from the first to
            the last token.
        groups: row indices (int64) of each micro-batch, longest rows first.
        longest: maximum of ``lengths``.
        budget: tokens per micro-batch for packed rows; None without packing or budget.
        images: images of each row, encoded; empty if no row has any.
        vision: adds the images to a micro-batch; None for a model of text.
    """

    source: Rows
    lengths: Tensor
    groups: list[Tensor]
    longest: int
    budget: int | None = None
    images: Sequence[tuple[bytes, ...]] = ()
    vision: MicroImages | None = None

    def __len__(self) -> int:
        return len(self.groups)

    def split_to(self, count: int) -> BatchPlan:
        """Return a plan with ``count`` micro-batches if this plan packs by budget and has fewer, else this plan.

        Ranks that share a model run the same number of micro-batches; spreading the rows over all of them needs the
        least memory.
        """
        if self.budget is None or not 0 < len(self.groups) < count:
            return self
        return replace(self, groups=_balanced(self.lengths.tolist(), self.budget, count))

    def cut(self, index: int) -> MicroBatch:
        """Return micro-batch ``index`` in host memory; a dummy if this rank has fewer."""
        micro = self.source.cut(self.groups[index]) if index < len(self) else dummy_micro_batch()
        if self.vision is None:
            return micro
        return self.vision.attach(micro, [self.images[row] for row in micro.rows.tolist()] if self.images else [])

    def micro_batch(self, index: int, device: torch.device) -> MicroBatch:
        """Return micro-batch ``index`` on ``device``."""
        return move(self.cut(index), device)


def plan_batch(
    data: DataProto,
    settings: ForwardSettings,
    packs: bool = False,
    sequence_ranks: int = 1,
    vision: MicroImages | None = None,
) -> BatchPlan:
    """Split the rows by number or by token budget; deterministic for the same rows.

    Padded micro-batches get rows of similar length; packed ones get similar numbers of tokens. A row longer than the
    budget gets a micro-batch of its own instead of an error, because other ranks would wait for this one forever; see
    :func:`check_budget`.

    Args:
        data: the rank's rows, jagged or padded.
        settings: size or budget of a micro-batch.
        packs: True if rows go through the model without padding, which then does not count in the budget.
        sequence_ranks: ranks that share each row; a micro-batch has the budget of all of them.
        vision: adds images to micro-batches; None for an engine or model of text.

    Raises:
        CapabilityError: a row has images, and ``vision`` is None.
        ColumnError: a jagged batch lacks a column.
        ConfigError: the micro-batch size is below 1, or columns do not fit together.
    """
    source, images = _read_rows(data), read_images(data)
    if images and vision is None:
        raise CapabilityError(
            "the batch has images (multi_modal_data), which this engine does not pass to its model; use "
            "actor.engine.name=fsdp with a vision-language model"
        )
    starts, ends = source.starts, source.ends
    lengths = source.tokens if packs else ends - starts
    budget, size = settings.max_token_len_per_gpu, settings.micro_batch_size_per_gpu
    budget = None if budget is None else budget * sequence_ranks
    order = torch.sort(lengths, descending=True, stable=True).indices
    if budget is None:
        groups = _by_rows(order, size, packs)
    elif packs:
        groups = _balanced(lengths.tolist(), budget)
    else:
        groups = _by_tokens(order, starts, ends, budget)
    longest = int(lengths.max()) if len(lengths) else 0
    packed_budget = budget if packs else None
    return BatchPlan(source, lengths, groups, longest, packed_budget, images, vision)


def _read_rows(data: DataProto) -> Rows:
    columns = {name: data[name] for name in data.keys()}  # noqa: SIM118 (len and iteration are over rows)
    tensors = {name: column for name, column in columns.items() if isinstance(column, torch.Tensor)}
    jagged = {name: Jagged.of(column) for name, column in tensors.items() if column.layout == torch.jagged}
    dense = {name: column for name, column in tensors.items() if name not in jagged}
    return RaggedRows(dense, jagged) if "responses" in jagged else PaddedRows(dense)


def check_budget(longest: int, settings: ForwardSettings, sequence_ranks: int = 1) -> None:
    """Check that the longest row of all ranks fits the token budget.

    Args:
        longest: tokens of the longest row.
        settings: settings with the budget of one rank.
        sequence_ranks: ranks that share a row.

    Raises:
        ConfigError: it does not fit; the message names the row's length, the budget and the key.
    """
    budget = settings.max_token_len_per_gpu
    if budget is not None and longest > budget * sequence_ranks:
        shared = f" on {sequence_ranks} ranks" if sequence_ranks > 1 else ""
        raise ConfigError(
            f"a row of {longest} tokens does not fit max_token_len_per_gpu={budget}{shared}; "
            f"raise it to at least {-(-longest // sequence_ranks)}, or shorten prompts or responses"
        )


def dummy_micro_batch(device: torch.device | None = None) -> MicroBatch:
    """Return a micro-batch of one row with two tokens and an all-zero mask, for a rank that ran out of rows.

    Ranks that share a model gather its weights together in each forward and backward pass, so all of them must run the
    same number of passes.

    Args:
        device: device of the micro-batch; None for host memory.
    """
    inputs = {
        "input_ids": torch.zeros((1, 2), dtype=torch.int64, device=device),
        "attention_mask": torch.ones((1, 2), dtype=torch.int64, device=device),
        "position_ids": torch.arange(2, device=device).unsqueeze(0),
    }
    mask = torch.zeros((1, 1), dtype=torch.int64, device=device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return MicroBatch(none, inputs, inputs["input_ids"][:, 1:], mask, {}, none, is_dummy=True)


def _by_rows(order: Tensor, size: int | None, packs: bool) -> list[Tensor]:
    if size is not None and size < 1:
        raise ConfigError(f"micro_batch_size_per_gpu is {size}, it must be at least 1")
    if not len(order):
        return []
    if not packs:
        return list(torch.split(order, size or len(order)))
    # Dealt in alternating direction, so that each pack gets long and short rows.
    count = -(-len(order) // (size or len(order)))
    turn = torch.arange(len(order))
    place = torch.where(turn // count % 2 == 0, turn % count, count - 1 - turn % count)
    return [order[place == number] for number in range(count)]


def _balanced(lengths: Sequence[int], budget: int, at_least: int = 1) -> list[Tensor]:
    """Return the rows in as few parts of at most ``budget`` tokens as possible, balanced where possible."""
    if not lengths:
        return []
    needed = _first_fit(lengths, budget)
    for count in range(max(at_least, -(-sum(lengths) // budget), 1), len(needed)):
        parts = karmarkar_karp(lengths, count, equal_size=False)
        if max(sum(lengths[row] for row in part) for part in parts) <= budget:
            return _as_rows(parts)
    count = min(max(at_least, len(needed)), len(lengths))
    parts = karmarkar_karp(lengths, count, equal_size=False)
    if max(sum(lengths[row] for row in part) for part in parts) <= max(budget, *lengths):
        return _as_rows(parts)
    while len(needed) < count:
        longest = max(needed, key=len)
        needed.remove(longest)
        needed += [longest[::2], longest[1::2]]
    return _as_rows(needed)


def _as_rows(parts: Sequence[Sequence[int]]) -> list[Tensor]:
    return [torch.tensor(part, dtype=torch.int64) for part in parts if part]


def _first_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Put each row, longest first, into the first part with room."""
    parts: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        length = lengths[row]
        target = next((number for number, free in enumerate(room) if free >= length), None)
        if target is None:
            parts.append([row])
            room.append(budget - length)
        else:
            parts[target].append(row)
            room[target] -= length
    return parts


def _by_tokens(order: Tensor, starts: Tensor, ends: Tensor, budget: int) -> list[Tensor]:
    """Greedily fill micro-batches up to ``budget`` padded tokens."""
    groups: list[list[int]] = []
    start = end = 0
    for row, row_start, row_end in zip(order.tolist(), starts[order].tolist(), ends[order].tolist(), strict=True):
        new_start, new_end = min(start, row_start), max(end, row_end)
        if groups and (len(groups[-1]) + 1) * (new_end - new_start) <= budget:
            groups[-1].append(row)
            start, end = new_start, new_end
        else:
            groups.append([row])
            start, end = row_start, row_end
    return [torch.tensor(group, dtype=torch.int64) for group in groups]
