"""The rows of a batch on their way to the device: jagged rows are padded, padded rows are cut, in host memory.

Everything that needs the values of lengths or masks is computed there, so that the device never has to be waited for.

Axes: ``B`` rows, ``P`` prompt and ``T`` response positions of the batch; a micro-batch of ``b`` rows keeps ``p <= P``
and ``t <= T`` of them, without the columns that are padding in all its rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rollcast.errors import ColumnError, ConfigError
from rollcast.protocol import DataProto, Jagged

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MODEL_INPUTS", "MicroBatch", "PaddedRows", "RaggedRows", "Rows", "trained_positions"]

MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids")


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a batch, padded to their longest prompt and response, in host memory or on the engine's device.

    Attributes:
        rows: indices of the rows in the batch, int64 ``[b]``.
        model_inputs: ``input_ids``, ``attention_mask`` and ``position_ids``, int64 ``[b, p + t]``.
        responses: response token ids, int64 ``[b, t]``.
        response_mask: mask of the trained tokens, ``[b, t]``.
        columns: all tensor columns of the batch except the mask, padded alike.
        trained: int64 ``[M]``, positions in ``[b * t]`` of the tokens under the response mask.
        is_dummy: True for a placeholder on a rank that has run out of rows; it must not count.
        tokens: int64 ``[n]``, positions in ``[b * t]`` of a jagged batch's response tokens; None for a
            padded batch.
        targets: int64 ``[n]``, positions of these tokens among all response tokens of the batch.
    """

    rows: Tensor
    model_inputs: dict[str, Tensor]
    responses: Tensor
    response_mask: Tensor
    columns: dict[str, Tensor]
    trained: Tensor
    is_dummy: bool = False
    tokens: Tensor | None = None
    targets: Tensor | None = None

    def scatter(self, values: Tensor, output: Tensor) -> None:
        """Write ``values`` ``[b, t]`` into an output of the batch at this micro-batch's rows, with zeros outside the
        mask.

        Args:
            values: float ``[b, t]``.
            output: float32, ``[N]`` for a jagged batch, ``[B, T]`` for a padded one; on the device of ``values``, so
                that nothing waits for them.
        """
        values_of_responses = values.detach().to(torch.float32).where(self.response_mask > 0, 0.0)
        if self.tokens is None or self.targets is None:
            output[self.rows.to(output.device), : values.size(1)] = values_of_responses.to(output.device)
        else:
            output[self.targets.to(output.device)] = values_of_responses.flatten()[self.tokens].to(output.device)


class Rows(ABC):
    """Rows of one rank.

    Attributes:
        prompt_width, response_width: ``P`` and ``T``.
        starts, ends: int64 ``[B]``; a row's tokens occupy positions ``starts .. ends - 1`` of ``[P + T]``, with at
            least one position on each side of ``P``.
        tokens: int64 ``[B]``, tokens of each row without padding.
    """

    prompt_width: int
    response_width: int
    starts: Tensor
    ends: Tensor
    tokens: Tensor

    @abstractmethod
    def counts(self) -> tuple[float, float]:
        """Return the number of tokens under the response mask, and of rows with at least one such token."""

    @abstractmethod
    def cut(self, rows: Tensor) -> MicroBatch:
        """Return the micro-batch of these rows, in host memory."""

    @abstractmethod
    def empty_outputs(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return zero tensors for :meth:`MicroBatch.scatter` to write to, float32 in host memory."""

    @abstractmethod
    def as_batch(self, outputs: Mapping[str, Tensor]) -> DataProto:
        """Return outputs as columns of a batch in the layout of these rows."""


class PaddedRows(Rows):
    """Rows of a batch with ``input_ids``, ``attention_mask``, ``position_ids``, ``responses`` and ``response_mask``.

    Raises:
        ConfigError: the batch has no prompt position or no response position.
    """

    def __init__(self, columns: Mapping[str, Tensor]) -> None:
        self._columns = columns
        width, self.response_width = columns["input_ids"].size(1), columns["responses"].size(1)
        self.prompt_width = width - self.response_width
        if self.prompt_width < 1 or self.response_width < 1:
            raise ConfigError(
                f"a batch needs at least one prompt and one response position, but input_ids has {width} "
                f"and responses {self.response_width} columns"
            )
        attention = columns["attention_mask"] > 0
        positions = torch.arange(width).expand(attention.shape)
        self.starts = positions.where(attention, width).amin(1).clamp(max=self.prompt_width - 1)
        self.ends = positions.where(attention, -1).amax(1).add(1).clamp(min=self.prompt_width + 1)
        self.tokens = attention.sum(1)

    def counts(self) -> tuple[float, float]:
        mask = self._columns["response_mask"] > 0
        return float(mask.sum()), float(mask.any(-1).sum())

    def cut(self, rows: Tensor) -> MicroBatch:
        start, end = int(self.starts[rows].min()), int(self.ends[rows].max())
        response = slice(0, end - self.prompt_width)
        cut = {
            name: self._cut(name, column[rows], slice(start, end), response) for name, column in self._columns.items()
        }
        mask = cut.pop("response_mask")
        inputs = {name: cut[name] for name in MODEL_INPUTS}
        return MicroBatch(rows, inputs, cut["responses"], mask, cut, trained_positions(mask))

    def _cut(self, name: str, column: Tensor, whole: slice, response: slice) -> Tensor:
        if name in MODEL_INPUTS:
            return column[:, whole]
        if name == "prompts":
            return column[:, whole.start :]
        if column.dim() > 1 and column.size(1) == self.response_width:
            return column[:, response]
        return column

    def empty_outputs(self, names: Sequence[str]) -> dict[str, Tensor]:
        shape = (len(self.starts), self.response_width)
        return {name: torch.zeros(shape, dtype=torch.float32) for name in names}

    def as_batch(self, outputs: Mapping[str, Tensor]) -> DataProto:
        return DataProto.from_dict(tensors=outputs)


class RaggedRows(Rows):
    """Rows of a batch with jagged ``prompts``, ``responses`` and ``response_mask``.

    Args:
        dense: the other tensor columns, ``[B, ...]``.
        jagged: all jagged columns, flat.

    Raises:
        ColumnError: a column is missing, or the mask's rows are not as long as the responses.
    """

    def __init__(self, dense: Mapping[str, Tensor], jagged: Mapping[str, Jagged]) -> None:
        for name in ("prompts", "responses", "response_mask"):
            if name not in jagged:
                raise ColumnError(
                    f"a jagged batch of an engine needs the jagged column {name!r}; it has {sorted(jagged)}"
                )
        self._dense = dense
        self._prompts, self._responses, self._mask = (
            jagged["prompts"],
            jagged["responses"],
            jagged["response_mask"],
        )
        if not torch.equal(self._mask.offsets, self._responses.offsets):
            raise ColumnError("the rows of response_mask are not as long as those of responses")
        self._others = {name: column for name, column in jagged.items() if name not in ("prompts", "responses")}
        prompt, response = self._prompts.lengths, self._responses.lengths
        count = len(prompt)
        self.prompt_width = max(int(prompt.max()), 1) if count else 1
        self.response_width = max(int(response.max()), 1) if count else 1
        self.starts = (self.prompt_width - prompt).clamp(max=self.prompt_width - 1)
        self.ends = (self.prompt_width + response).clamp(min=self.prompt_width + 1)
        self.tokens = prompt + response

    def counts(self) -> tuple[float, float]:
        row_counts = self._mask.with_values(self._mask.values.bool()).sums()
        return float(row_counts.sum()), float((row_counts > 0).sum())

    def cut(self, rows: Tensor) -> MicroBatch:
        width = self.prompt_width - int(self.starts[rows].min())
        response_width = int(self.ends[rows].max()) - self.prompt_width
        prompt, response = self._prompts.lengths[rows], self._responses.lengths[rows]
        picks: dict[tuple[int, bool], _Pick] = {}

        def padded(column: Jagged, wide: int | None, left: bool = False) -> Tensor:
            key = (id(column.offsets), left)
            if key not in picks:
                picks[key] = _Pick.of(column.offsets, rows, wide, left)
            return picks[key].pad(column.values)

        prompts = padded(self._prompts, width, left=True).long()
        responses = padded(self._responses, response_width).long()
        # Columns with the offsets of the responses reuse their pick.
        columns = {
            name: padded(column, response_width if _same_rows(column, self._responses) else None)
            for name, column in self._others.items()
        }
        mask = columns.pop("response_mask").long()
        places = torch.arange(width + response_width)
        attention = (places >= width - prompt.unsqueeze(1)) & (places < width + response.unsqueeze(1))
        inputs = {
            "input_ids": torch.cat([prompts, responses], 1),
            "attention_mask": attention.long(),
            "position_ids": (places - (width - prompt.unsqueeze(1))).clamp(min=0) * attention,
        }
        dense = {name: column[rows] for name, column in self._dense.items()}
        positions = picks[id(self._responses.offsets), False]
        return MicroBatch(
            rows=rows,
            model_inputs=inputs,
            responses=responses,
            response_mask=mask,
            columns={**inputs, "prompts": prompts, "responses": responses, **dense, **columns},
            trained=trained_positions(mask),
            tokens=positions.places,
            targets=positions.positions,
        )

    def empty_outputs(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: torch.zeros(len(self._responses.values), dtype=torch.float32) for name in names}

    def as_batch(self, outputs: Mapping[str, Tensor]) -> DataProto:
        columns = {name: self._responses.like(values) for name, values in outputs.items()}
        return DataProto.from_dict(tensors=columns, length=len(self.starts))


def trained_positions(response_mask: Tensor) -> Tensor:
    """Return the positions in ``[b * t]`` under a mask ``[b, t]``; on a device this would wait for it."""
    return (response_mask > 0).flatten().nonzero().flatten()


def _same_rows(column: Jagged, responses: Jagged) -> bool:
    return column.offsets is responses.offsets or torch.equal(column.offsets, responses.offsets)


@dataclass(frozen=True)
class _Pick:
    """Source positions of some rows of a jagged column, and their places in ``[b, width]``."""

    positions: Tensor
    places: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, offsets: Tensor, rows: Tensor, width: int | None, left: bool) -> _Pick:
        starts = offsets[rows]
        lengths = offsets[rows + 1] - starts
        if width is None:
            width = int(lengths.max()) if len(rows) else 0
        ends = lengths.cumsum(0)
        total = int(ends[-1]) if len(rows) else 0
        row = torch.repeat_interleave(lengths, output_size=total)
        place = torch.arange(total) - (ends - lengths)[row]
        shift = width - lengths[row] if left else 0
        return cls(starts[row] + place, row * width + place + shift, (len(rows), width))

    def pad(self, values: Tensor) -> Tensor:
        rows, width = self.shape
        picked = values[self.positions]
        padded = picked.new_zeros((rows * width, *values.shape[1:]))
        return padded.index_copy_(0, self.places, picked).view(rows, width, *values.shape[1:])
