"""Inputs of the decoder: rows that start at position 0, and the positions to predict from.

Axes: ``b`` rows, ``p`` prompt and ``t`` response positions of a micro-batch, ``N`` positions of all its rows in the
decoder, ``s`` positions of each decoder row on this rank, ``n`` response tokens under the mask that this rank predicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region

from rollcast.errors import DataProtoError

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast_engine.batching import MicroBatch

__all__ = ["DecoderInputs", "PackedRows", "Positions", "RowLayout", "decoder_inputs"]


@dataclass(frozen=True)
class RowLayout:
    """The division of a micro-batch's tokens among the ranks that share its rows.

    Attributes:
        packs: concatenate the rows to one without padding.
        tensor_ranks: ranks that share positions evenly under sequence parallelism.
        context_ranks, context_rank: ranks that split each row, and the index of this one. A row is cut into
            ``2 * context_ranks`` equal chunks, of which rank ``r`` has the ``r``-th from the start and from the end:
            under causal attention, early and late chunks together cost the same on each rank.
        context_group: process group of these ranks; None for a single one.
    """

    packs: bool = False
    tensor_ranks: int = 1
    context_ranks: int = 1
    context_rank: int = 0
    context_group: Any = None

    @property
    def chunks(self) -> int:
        """Number of chunks that each row is cut into, and a divisor of its length."""
        return 2 * self.context_ranks if self.context_ranks > 1 else 1


@dataclass
class PackedRows(PackedSeqParams):  # type: ignore[misc]
    """megatron-core's description of packed rows, with the lengths in host memory as well.

    Attributes:
        lengths: positions of each row, over all context-parallel ranks.
    """

    lengths: tuple[int, ...] = ()


@dataclass(frozen=True)
class Positions:
    """The positions that predict the response tokens under the mask, as far as this rank has them.

    Attributes:
        places: int64 ``[n]``, index of each position in this rank's hidden states, flattened to ``[s * b]``.
        rows, columns: int64 ``[n]``, row and response column of the token that it predicts.
        targets: int64 ``[n]``, the predicted token.
        shape: ``(b, t)`` of the responses.
        group: process group of the context-parallel ranks, which have the other positions; None for a single one.
    """

    places: Tensor
    rows: Tensor
    columns: Tensor
    targets: Tensor
    shape: tuple[int, int]
    group: Any = None

    def spread(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return values ``[n]`` by name at their rows and columns of ``[b, t]``, zero elsewhere; differentiable.

        Every context-parallel rank returns the values of all of them. All then compute the same loss, so each keeps
        the gradient of its own positions.
        """
        where = (self.rows, self.columns)
        table = torch.stack([value.new_zeros(self.shape).index_put(where, value) for value in values.values()])
        if self.group is not None:
            table = reduce_from_tensor_model_parallel_region(table, group=self.group)
        return dict(zip(values, table.unbind(), strict=True))


@dataclass(frozen=True)
class DecoderInputs:
    """Inputs of the decoder on this rank.

    Attributes:
        input_ids, position_ids: int64 ``[b, s]``, or ``[1, s]`` for packed rows.
        rows: row of each position, of the same shape; -1 for the padding of a pack.
        positions: the positions to predict from.
        packed: the rows in it; None without packing.
    """

    input_ids: Tensor
    position_ids: Tensor
    rows: Tensor
    positions: Positions
    packed: PackedRows | None = None


def decoder_inputs(micro: MicroBatch, layout: RowLayout) -> DecoderInputs:
    """Move each row's tokens to the front, dropping tokens that the attention mask hides.

    Rotary embeddings depend only on distances, so the start position of a row does not matter; with padding only at the
    end, causal attention needs no mask. A row's last token predicts nothing and is left out.

    Args:
        micro: micro-batch whose ``position_ids`` count the tokens under the attention mask.
        layout: division of the tokens among ranks.

    Raises:
        DataProtoError: the positions do not increase by one.
    """
    response_length = micro.responses.size(1)
    inputs, first = micro.model_inputs, micro.model_inputs["input_ids"].size(1) - response_length
    chosen = micro.response_mask > 0
    shown = inputs["attention_mask"] > 0
    shown[:, first:] |= chosen
    # The first response token needs a position to be predicted from, even if a prompt is empty.
    shown[:, first - 1] = True
    places = shown.cumsum(1) - 1
    _check_positions(inputs["position_ids"], inputs["attention_mask"] > 0, places)
    slots = _Slots.of(places[:, -1], layout)
    rows, columns = (shown & (places < places[:, -1:])).nonzero(as_tuple=True)
    input_ids = inputs["input_ids"].new_zeros(slots.count)
    input_ids[slots.starts[rows] + places[rows, columns]] = inputs["input_ids"][rows, columns]
    rows, columns = chosen.nonzero(as_tuple=True)
    before = slots.starts[rows] + places[rows, columns + first] - 1
    mine = slots.own[before]
    rows, columns = rows[mine], columns[mine]
    positions = Positions(
        places=slots.places(before[mine]),
        rows=rows,
        columns=columns,
        targets=micro.responses[rows, columns],
        shape=(shown.size(0), response_length),
        group=layout.context_group if layout.context_ranks > 1 else None,
    )
    return DecoderInputs(slots.cut(input_ids), slots.cut(slots.within), slots.cut(slots.rows), positions, slots.packed)


@dataclass(frozen=True)
class _Slots:
    """The decoder's positions of all rows, one row after the other, and this rank's among them.

    Attributes:
        count: ``N``, including the padding at the end of rows.
        starts: int64 ``[b]``, position of each row's first token.
        rows: int64 ``[N]``, row of each position; -1 for the padding of a pack.
        within: int64 ``[N]``, position within its row.
        own: bool ``[N]``, positions of this rank.
        width, length: number of decoder rows, and positions of each on this rank.
        packed: description of packed rows; None without packing.
    """

    count: int
    starts: Tensor
    rows: Tensor
    within: Tensor
    own: Tensor
    width: int
    length: int
    packed: PackedRows | None

    @classmethod
    def of(cls, needed: Tensor, layout: RowLayout) -> _Slots:
        """Return the positions for rows of these lengths, int64 ``[b]``."""
        chunks, rows, device = layout.chunks, len(needed), needed.device
        multiple = layout.tensor_ranks * chunks
        if layout.packs:
            lengths = [-(-length // chunks) * chunks for length in needed.tolist()]
            total = sum(lengths)
            # Padding of the whole pack is a row of its own, which nothing else attends to.
            lengths.append(-total % multiple if total else multiple)
        else:
            longest = max(int(needed.max()), 1)
            lengths = [longest + -longest % multiple] * rows
        sizes = torch.tensor(lengths, device=device)
        ends = sizes.cumsum(0)
        starts = ends - sizes
        within = torch.arange(sum(lengths), device=device) - starts.repeat_interleave(sizes)
        numbers = torch.arange(len(sizes), device=device).repeat_interleave(sizes)
        numbers = numbers.where(numbers < rows, -1)
        own = torch.ones_like(within, dtype=torch.bool)
        if chunks > 1:
            chunk = within // (sizes // chunks).repeat_interleave(sizes)
            own = (chunk == layout.context_rank) | (chunk == chunks - 1 - layout.context_rank)
        packed = _packed([length for length in lengths if length], device) if layout.packs else None
        count, width = sum(lengths), 1 if layout.packs else rows
        return cls(count, starts[:rows], numbers, within, own, width, count // width // layout.context_ranks, packed)

    def cut(self, values: Tensor) -> Tensor:
        """Return this rank's part of ``[N]`` values, ``[b, s]``."""
        return values[self.own].view(self.width, self.length)

    def places(self, slots: Tensor) -> Tensor:
        """Return the index of own positions in this rank's hidden states, flattened to ``[s * b]``."""
        local = (self.own.cumsum(0) - 1)[slots]
        return local % self.length * self.width + local // self.length


def _packed(lengths: list[int], device: torch.device) -> PackedRows:
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    longest = max(lengths)
    return PackedRows(
        qkv_format="thd",
        # Padding counts as part of its row: it is at the end, where causal attention hides it from the row's tokens.
        # With bounds of the padding beside these, Transformer Engine lets the host compare them in every layer.
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=tuple(lengths),
    )


def _check_positions(position_ids: Tensor, attended: Tensor, places: Tensor) -> None:
    ahead = position_ids - places
    far = torch.iinfo(ahead.dtype).max
    low = ahead.where(attended, far).amin(1)
    high = ahead.where(attended, -far).amax(1)
    if bool(((low != high) & attended.any(1)).any()):
        raise DataProtoError(
            "the megatron engine needs position_ids that count the tokens of each row by one, from any start; "
            "this batch has others; use engine=fsdp"
        )
