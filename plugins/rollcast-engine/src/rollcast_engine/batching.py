"""Splitting a rank's rows into micro-batches, and putting their outputs back in order.

Axes: ``B`` rows, ``P`` prompt and ``T`` response positions of the batch; a micro-batch of ``b``
rows keeps ``p <= P`` and ``t <= T`` of them, without the columns that are padding in all its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rollcast.errors import ConfigError

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
        groups: rows (int64) of each micro-batch, longest rows first.
        longest: tokens of the longest row.
    """

    columns: Mapping[str, Tensor]
    prompt_width: int
    response_width: int
    starts: Tensor
    ends: Tensor
    groups: list[Tensor]
    longest: int

    def __len__(self) -> int:
        return len(self.groups)

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


def plan_batch(columns: Mapping[str, Tensor], settings: ForwardSettings) -> BatchPlan:
    """Sort the rows by length and split them by rows or by token budget; the same for the same rows.

    A row longer than the budget is not refused here (other ranks would wait for this one in vain)
    but gets a micro-batch of its own; see :func:`check_budget`.

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
    spans = ends - starts
    order = torch.sort(spans, descending=True, stable=True).indices
    if settings.max_token_len_per_gpu is not None:
        groups = _by_tokens(order, starts, ends, settings.max_token_len_per_gpu)
    else:
        groups = _by_rows(order, settings.micro_batch_size_per_gpu)
    longest = int(spans.max()) if len(spans) else 0
    return BatchPlan(columns, prompt_width, response_width, starts, ends, groups, longest)


def tensor_columns(data: DataProto) -> dict[str, Tensor]:
    """The batch's dense tensor columns, by name."""
    columns = {name: data[name] for name in data.keys()}  # noqa: SIM118 (len and iteration are over rows)
    return {
        name: column for name, column in columns.items() if isinstance(column, torch.Tensor) and not column.is_nested
    }


def check_budget(longest: int, settings: ForwardSettings) -> None:
    """Refuse a batch whose longest row, of all ranks' rows, does not fit the token budget.

    Raises:
        ConfigError: names the row's length, the budget and the key.
    """
    budget = settings.max_token_len_per_gpu
    if budget is not None and longest > budget:
        raise ConfigError(
            f"a row of {longest} tokens does not fit max_token_len_per_gpu={budget}; "
            f"raise it to at least {longest}, or shorten prompts or responses"
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


def _by_rows(order: Tensor, size: int | None) -> list[Tensor]:
    if size is not None and size < 1:
        raise ConfigError(f"micro_batch_size_per_gpu is {size}, it must be at least 1")
    return list(torch.split(order, size or len(order))) if len(order) else []


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
