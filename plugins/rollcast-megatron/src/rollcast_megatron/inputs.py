"""Inputs of the decoder: rows that start at position 0, and the positions to predict from.

Axes: ``b`` rows, ``p`` prompt and ``t`` response positions of a micro-batch, ``s`` positions of the decoder's input,
``n`` response tokens under the mask.
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
        rows, places: int64 ``[n]``, row of each position, and its index in the decoder's input.
        columns: int64 ``[n]``, response column of the token that it predicts.
        targets: int64 ``[n]``, the predicted token.
        shape: ``(b, t)``.
    """

    rows: Tensor
    places: Tensor
    columns: Tensor
    targets: Tensor
    shape: tuple[int, int]

    def spread(self, values: Tensor) -> Tensor:
        """Return values ``[n]`` at their rows and columns of ``[b, t]``, zero elsewhere; differentiable."""
        return values.new_zeros(self.shape).index_put((self.rows, self.columns), values)


@dataclass(frozen=True)
class DecoderInputs:
    """Inputs of the decoder: ``input_ids`` and ``position_ids``, int64 ``[b, s]``, and the positions to predict
    from.
    """

    input_ids: Tensor
    position_ids: Tensor
    positions: Positions


def decoder_inputs(micro: MicroBatch, multiple: int) -> DecoderInputs:
    """Move each row's tokens to the front, dropping tokens that the attention mask hides.

    Rotary embeddings depend only on distances, so the start position of a row does not matter; with padding only at the
    end, causal attention needs no mask. A row's last token predicts nothing and is left out.

    Args:
        micro: micro-batch whose ``position_ids`` count the tokens under the attention mask.
        multiple: ``s`` is padded to a multiple of this number.

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
            "this batch has others; use engine=fsdp"
        )
