"""Micro-batches without padding: the rows are concatenated to one sequence, in host memory.

Axes: ``b`` rows of ``p`` prompt and ``t`` response positions, ``N`` tokens in the pack, ``n`` of them on this rank,
``M`` positions that predict a token under the mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rollcast_fsdp.attention import PackedRows

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast_engine.batching import MicroBatch

__all__ = ["Pack", "pack_rows"]


@dataclass(frozen=True)
class Pack:
    """This rank's part of a packed micro-batch, and the positions of its outputs.

    Attributes:
        input_ids, position_ids: int64 ``[1, n]``; positions restart with each row.
        rows: row layout for attention.
        places: int64 ``[M]``, positions within ``n`` whose outputs are used.
        tokens: int64 ``[M]``, the tokens after those positions.
        targets: int64 ``[M]``, positions of these tokens in the responses ``[b * t]``.
        row_numbers, token_numbers: int64 ``[n]``, row of each token, and its number among those of its row; -1 for
            padding.
    """

    input_ids: Tensor
    position_ids: Tensor
    rows: PackedRows
    places: Tensor
    tokens: Tensor
    targets: Tensor
    row_numbers: Tensor
    token_numbers: Tensor


def pack_rows(micro: MicroBatch, group: Any = None) -> Pack:
    """Pack a micro-batch without padding and without each row's last token, which predicts nothing.

    Args:
        micro: micro-batch in host memory in which every token under the response mask has a token before it.
        group: ranks that take equal parts of the tokens; None for a single rank.
    """
    inputs = micro.model_inputs
    present = inputs["attention_mask"] > 0
    nth = present.cumsum(1)
    predicted = present & (nth < nth[:, -1:])
    lengths = [length for length in predicted.sum(1).tolist() if length]
    count = sum(lengths)
    ranks = 1 if group is None else dist.get_world_size(group)
    # Every rank needs at least one token; padding tokens form a row of their own.
    filler = max(-count % ranks, ranks - count if count < ranks else 0)
    if filler:
        lengths.append(filler)
    ids = torch.nn.functional.pad(inputs["input_ids"][predicted], (0, filler))
    row_numbers = torch.nn.functional.pad(predicted.nonzero()[:, 0], (0, filler))
    token_numbers = torch.nn.functional.pad(nth[predicted] - 1, (0, filler), value=-1)
    positions = torch.cat([inputs["position_ids"][predicted], torch.arange(filler)])
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    width = micro.responses.size(1)
    # Position in the pack of the token before each trained token.
    before = (predicted.flatten().cumsum(0) - 1).view_as(predicted)[:, -width - 1 : -1].flatten()[micro.trained]
    size = len(ids) // ranks
    start = 0 if group is None else dist.get_rank(group) * size
    mine = (before >= start) & (before < start + size)
    return Pack(
        input_ids=ids[start : start + size].unsqueeze(0),
        position_ids=positions[start : start + size].unsqueeze(0),
        rows=PackedRows(tuple(lengths), bounds, group),
        places=before[mine] - start,
        tokens=micro.responses.flatten()[micro.trained][mine],
        targets=micro.trained[mine],
        row_numbers=row_numbers[start : start + size],
        token_numbers=token_numbers[start : start + size],
    )
