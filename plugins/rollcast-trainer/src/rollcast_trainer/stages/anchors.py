"""Anchors: ids of the observations that turns respond to, equal for turns with the same observation."""

from __future__ import annotations

from typing import ClassVar

import torch

from rollcast.contracts.stage import StageSpec
from rollcast.protocol import DataProto, Jagged
from rollcast_trainer.run.setups import TrainingStage

__all__ = ["AnchorStates", "find_anchors"]


class AnchorStates(TrainingStage):
    """Stage that writes ``anchor_ids``, jagged int64: the number of the observation that a token's turn responds to."""

    phase: ClassVar[str] = "advantage"
    spec: ClassVar[StageSpec] = StageSpec(
        reads=("prompts", "responses", "response_mask", "turn_ids"), writes=("anchor_ids",), after=("filter_groups",)
    )

    def __call__(self, batch: DataProto) -> DataProto:
        names = ("prompts", "responses", "response_mask", "turn_ids")
        return batch.with_columns({"anchor_ids": find_anchors(*(Jagged.of(batch[name], name) for name in names))})


def find_anchors(prompts: Jagged, responses: Jagged, response_mask: Jagged, turn_ids: Jagged) -> Jagged:
    """Return the anchor of each response token, int64 from 0, in the row layout of ``responses``.

    The observation of a turn consists of the tokens between the policy's last token before the turn and the first token
    of the turn; for the first turn of a row, of the prompt and the response tokens up to the turn. Turns with equal
    observation tokens have the same anchor. Tokens that the policy did not write have anchor 0.
    """
    inside = response_mask.values.bool()
    places = inside.nonzero().flatten()
    anchors = torch.zeros(len(responses.values), dtype=torch.int64)
    if not len(places):
        return responses.with_values(anchors)
    rows, turns = responses.rows[places], turn_ids.values[places]
    new_row = torch.ones_like(rows, dtype=torch.bool)
    new_row[1:] = rows[1:] != rows[:-1]
    new_turn = new_row.clone()
    new_turn[1:] |= turns[1:] != turns[:-1]
    # Start of the observation: after the last token that the policy wrote, or at the start of the response.
    behind = torch.where(new_row, responses.offsets[rows], torch.cat([places[:1], places[:-1] + 1]))
    ids, texts = (tokens.values.to(torch.int32).numpy() for tokens in (responses, prompts))
    bounds = prompts.offsets.tolist()
    known: dict[tuple[bool, bytes], int] = {}
    numbers: list[int] = []
    starts = [column[new_turn].tolist() for column in (rows, behind, places, new_row)]
    for row, start, stop, is_first in zip(*starts, strict=True):
        seen = ids[start:stop].tobytes()
        key = (is_first, texts[bounds[row] : bounds[row + 1]].tobytes() + seen if is_first else seen)
        numbers.append(known.setdefault(key, len(known)))
    anchors[places] = torch.tensor(numbers, dtype=torch.int64)[new_turn.long().cumsum(0) - 1]
    return responses.with_values(anchors)
