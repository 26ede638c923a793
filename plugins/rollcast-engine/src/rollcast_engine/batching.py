"""Splitting a rank's rows into micro-batches, and putting their outputs back in order.

Axes: ``B`` rows, ``P`` prompt and ``T`` response positions of the batch; a micro-batch of ``b``
rows keeps ``p <= P`` and ``t <= T`` of them, without the columns that are padding in all its rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from rollcast.errors import ConfigError
from rollcast.protocol import karmarkar_karp

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast.contracts.engine import ForwardSettings
    from rollcast.protocol import DataProto

__all__ = [
    "MODEL_INPUTS",
    "BatchPlan",
    "MicroBatch",
    "check_budget",
    "dummy_micro_batch",
    "plan_batch",
    "tensor_columns",
]

MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids")


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a batch, cut to their longest prompt and response, on the engine's device.

    Attributes:
        rows: int64 ``[b]``, their places in the batch.
        model_inputs: ``input_ids``, ``attention_mask`` and ``position_ids``, int64 ``[b, p + t]``.
        responses: int64 ``[b, t]``.
        response_mask: ``[b, t]``.
        columns: all tensor columns of the batch but the mask, cut alike.
        is_dummy: stands in for rows that this rank does not have; must not count.
    """

    rows: Tensor
    model_inputs: dict[str, Tensor]
    responses: Tensor
    response_mask: Tensor
    columns: dict[str, Tensor]
    is_dummy: bool = False

    def scatter(self, values: Tensor, output: Tensor) -> None:
        """Write ``values`` ``[b, t]`` where the mask is set to their rows of ``output`` ``[B, T]``."""
        kept = values.detach().to(torch.float32).where(self.response_mask > 0, 0.0)
        output[self.rows, : values.size(1)] = kept.to(output.device)


@dataclass(frozen=True)
class BatchPlan:
    """Which rows go into which micro-batch, and which columns of each row are not padding.

    Attributes:
        columns: the batch's tensor columns.
        prompt_width, response_width: ``P`` and ``T``.
        starts, ends: int64 ``[B]``; a row's tokens stand in columns ``starts .. ends - 1``, of which
            at least one each side of ``P``.
        lengths: int64 ``[B]``, what a row counts for: with packing its tokens, else all from its first to its last.
        groups: rows (int64) of each micro-batch, longest rows first.
        longest: the largest of the lengths.
        budget: tokens a micro-batch, where the plan is for packs; None where it is not.
    """

    columns: Mapping[str, Tensor]
    prompt_width: int
    response_width: int
    starts: Tensor
    ends: Tensor
    lengths: Tensor
    groups: list[Tensor]
    longest: int
    budget: int | None = None

    def __len__(self) -> int:
        return len(self.groups)

    def split_to(self, count: int) -> BatchPlan:
        """The same rows in ``count`` micro-batches, if they are to be packed by a budget and there are fewer.

        Ranks that share a model run the same number; rows spread over all of them need the least memory.
        """
        if self.budget is None or not 0 < len(self.groups) < count:
            return self
        return replace(self, groups=_balanced(self.lengths.tolist(), self.budget, count))

    def micro_batch(self, index: int, device: torch.device) -> MicroBatch:
        """The micro-batch ``index`` on ``device``."""
        rows = self.groups[index]
        start, end = int(self.starts[rows].min()), int(self.ends[rows].max())
        response = slice(0, end - self.prompt_width)
        cut = {
            name: self._cut(name, column[rows], slice(start, end), response).to(device)
            for name, column in self.columns.items()
        }
        mask = cut.pop("response_mask")
        return MicroBatch(rows, {name: cut[name] for name in MODEL_INPUTS}, cut["responses"], mask, cut)

    def _cut(self, name: str, column: Tensor, whole: slice, response: slice) -> Tensor:
        if name in MODEL_INPUTS:
            return column[:, whole]
        if name == "prompts":
            return column[:, whole.start :]
        if column.dim() > 1 and column.size(1) == self.response_width:
            return column[:, response]
        return column


def plan_batch(
    columns: Mapping[str, Tensor], settings: ForwardSettings, packs: bool = False, sequence_ranks: int = 1
) -> BatchPlan:
    """Split the rows by their number or by token budget; the same for the same rows.

    Padded micro-batches get rows of about one length each, packed ones about as many tokens each as the others.

    A row longer than the budget is not refused here (other ranks would wait for this one in vain)
    but gets a micro-batch of its own; see :func:`check_budget`.

    Args:
        columns: the batch's.
        settings: size or budget of a micro-batch.
        packs: rows go through the model without padding, which the budget then does not count.
        sequence_ranks: ranks that share each row; a micro-batch has the budget of all of them.

    Raises:
        ConfigError: a micro-batch size below 1, or columns that do not fit together.
    """
    width, response_width = columns["input_ids"].size(1), columns["responses"].size(1)
    prompt_width = width - response_width
    if prompt_width < 1 or response_width < 1:
        raise ConfigError(
            f"a batch needs at least one prompt and one response position, but input_ids has {width} "
            f"and responses {response_width} columns"
        )
    attention = columns["attention_mask"] > 0
    positions = torch.arange(width).expand(attention.shape)
    starts = positions.where(attention, width).amin(1).clamp(max=prompt_width - 1)
    ends = positions.where(attention, -1).amax(1).add(1).clamp(min=prompt_width + 1)
    lengths = attention.sum(1) if packs else ends - starts
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
    return BatchPlan(columns, prompt_width, response_width, starts, ends, lengths, groups, longest, packed_budget)


def tensor_columns(data: DataProto) -> dict[str, Tensor]:
    """The batch's dense tensor columns, by name."""
    columns = {name: data[name] for name in data.keys()}  # noqa: SIM118 (len and iteration are over rows)
    return {
        name: column for name, column in columns.items() if isinstance(column, torch.Tensor) and not column.is_nested
    }


def check_budget(longest: int, settings: ForwardSettings, sequence_ranks: int = 1) -> None:
    """Refuse a batch whose longest row, of all ranks' rows, does not fit the token budget.

    Args:
        longest: its tokens.
        settings: hold the budget of one rank.
        sequence_ranks: ranks that share a row.

    Raises:
        ConfigError: names the row's length, the budget and the key.
    """
    budget = settings.max_token_len_per_gpu
    if budget is not None and longest > budget * sequence_ranks:
        shared = f" on {sequence_ranks} ranks" if sequence_ranks > 1 else ""
        raise ConfigError(
            f"a row of {longest} tokens does not fit max_token_len_per_gpu={budget}{shared}; "
            f"raise it to at least {-(-longest // sequence_ranks)}, or shorten prompts or responses"
        )


def dummy_micro_batch(device: torch.device) -> MicroBatch:
    """One row of two tokens under no mask, for a rank that ran out of rows.

    Ranks that share a model gather its weights together in each forward and backward, so all of
    them run the same number.
    """
    inputs = {
        "input_ids": torch.zeros((1, 2), dtype=torch.int64, device=device),
        "attention_mask": torch.ones((1, 2), dtype=torch.int64, device=device),
        "position_ids": torch.arange(2, device=device).unsqueeze(0),
    }
    mask = torch.zeros((1, 1), dtype=torch.int64, device=device)
    return MicroBatch(torch.zeros(0, dtype=torch.int64), inputs, inputs["input_ids"][:, 1:], mask, {}, is_dummy=True)


def _by_rows(order: Tensor, size: int | None, packs: bool) -> list[Tensor]:
    if size is not None and size < 1:
        raise ConfigError(f"micro_batch_size_per_gpu is {size}, it must be at least 1")
    if not len(order):
        return []
    if not packs:
        return list(torch.split(order, size or len(order)))
    # Dealt out to and fro, so that each pack has long and short rows.
    count = -(-len(order) // (size or len(order)))
    turn = torch.arange(len(order))
    place = torch.where(turn // count % 2 == 0, turn % count, count - 1 - turn % count)
    return [order[place == number] for number in range(count)]


def _balanced(lengths: Sequence[int], budget: int, at_least: int = 1) -> list[Tensor]:
    """Rows in parts of at most ``budget`` tokens, nearly equal ones where that can be, and as few as can be."""
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
    """Longest rows first, each into the first part that has room."""
    parts: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        length = lengths[row]
        found = next((number for number, free in enumerate(room) if free >= length), None)
        if found is None:
            parts.append([row])
            room.append(budget - length)
        else:
            parts[found].append(row)
            room[found] -= length
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
