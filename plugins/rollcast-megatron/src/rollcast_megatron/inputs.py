"""A micro-batch as the decoder takes it: rows that start at position 0, and the positions that matter.

Axes: ``b`` rows, ``p`` prompt and ``t`` response positions of a micro-batch, ``s`` positions that the
decoder sees, ``n`` response tokens under the mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rollcast.errors import DataProtoError

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast_engine.batching import MicroBatch

__all__ = ["DecoderInputs", "Positions", "decoder_inputs"]


@dataclass(frozen=True)
class Positions:
    """The positions that predict the response tokens under the mask.

    Attributes:
        rows, places: int64 ``[n]``, each one's row and its position in what the decoder sees.
        columns: int64 ``[n]``, the response column of the token that it predicts.
        targets: int64 ``[n]``, that token.
        shape: ``(b, t)``.
    """

    rows: Tensor
    places: Tensor
    columns: Tensor
    targets: Tensor
    shape: tuple[int, int]

    def spread(self, values: Tensor) -> Tensor:
        """Values ``[n]`` at their rows and columns of ``[b, t]``, zero elsewhere; with gradient."""
        return values.new_zeros(self.shape).index_put((self.rows, self.columns), values)


@dataclass(frozen=True)
class DecoderInputs:
    """``input_ids`` and ``position_ids``, int64 ``[b, s]``, and what to predict from them."""

    input_ids: Tensor
    position_ids: Tensor
    positions: Positions


def decoder_inputs(micro: MicroBatch, multiple: int) -> DecoderInputs:
    """Move each row's tokens to the front, without what the attention mask hides.

    Rotary embeddings see only distances, so it does not matter where a row starts; and with padding only at
    the end, causal attention needs no mask. Of a row's last token nothing is predicted, so it is left out.

    Args:
        micro: whose ``position_ids`` count the tokens that the attention mask shows.
        multiple: of which ``s`` has to be one.

    Raises:
        DataProtoError: the positions do not count by one.
    """
    response_length = micro.responses.size(1)
    inputs, first = micro.model_inputs, micro.model_inputs["input_ids"].size(1) - response_length
    chosen = micro.response_mask > 0
    shown = inputs["attention_mask"] > 0
    shown[:, first:] |= chosen
    # The first response token has to be predicted from something, even where a prompt is empty.
    shown[:, first - 1] = True
    places = shown.cumsum(1) - 1
    _check_positions(inputs["position_ids"], inputs["attention_mask"] > 0, places)
    width = max(int(places[:, -1].max()), 1)
    width += -width % multiple
    rows, columns = shown.nonzero(as_tuple=True)
    kept = places[rows, columns] < width
    rows, columns = rows[kept], columns[kept]
    input_ids = inputs["input_ids"].new_zeros((shown.size(0), width))
    input_ids[rows, places[rows, columns]] = inputs["input_ids"][rows, columns]
    rows, columns = chosen.nonzero(as_tuple=True)
    positions = Positions(
        rows=rows,
        places=places[rows, columns + first] - 1,
        columns=columns,
        targets=micro.responses[rows, columns],
        shape=(shown.size(0), response_length),
    )
    position_ids = torch.arange(width, device=input_ids.device).expand_as(input_ids)
    return DecoderInputs(input_ids, position_ids, positions)


def _check_positions(position_ids: Tensor, attended: Tensor, places: Tensor) -> None:
    ahead = position_ids - places
    far = torch.iinfo(ahead.dtype).max
    low = ahead.where(attended, far).amin(1)
    high = ahead.where(attended, -far).amax(1)
    if bool(((low != high) & attended.any(1)).any()):
        raise DataProtoError(
            "the megatron engine needs position_ids that count the tokens of each row by one, from any start; "
            "those of this batch do not; use engine=fsdp for them"
        )
