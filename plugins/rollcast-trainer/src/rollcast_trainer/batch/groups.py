"""Groups: the rows of one prompt, told apart by ``uid``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollcast.protocol import DataProto

__all__ = ["first_groups", "first_rows", "groups_that_differ", "join_generated", "join_groups"]

_LEFT = {"prompts": "pad", "input_ids": "pad", "attention_mask": 0}
_RIGHT = {
    "responses": "pad",
    "input_ids": "pad",
    "attention_mask": 0,
    "response_mask": 0,
    "rollout_log_probs": 0,
    "token_level_scores": 0,
}


def groups_that_differ(uid: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """Return the rows (bool ``[B]``) of groups in which not all scores are the same.

    Args:
        uid: group of each row, int64 ``[B]``.
        score: float ``[B]``.
    """
    groups = int(uid.max()) + 1 if len(uid) else 0
    low = torch.full((groups,), torch.inf).scatter_reduce(0, uid, score, "amin")
    high = torch.full((groups,), -torch.inf).scatter_reduce(0, uid, score, "amax")
    return (high > low)[uid]


def first_groups(batch: DataProto, count: int) -> DataProto:
    """The rows of the first ``count`` groups, which are numbered anew from 0."""
    found, uid = batch["uid"].unique(return_inverse=True)
    kept = batch.with_columns({"uid": uid})
    return kept if len(found) <= count else kept.select_idxs((uid < count).nonzero().flatten())


def join_generated(batches: Sequence[DataProto], pad_token_id: int) -> DataProto:
    """Generated batches of different widths as one: prompts padded on the left, responses on the right.

    Args:
        batches: as a step's sampling leaves them; groups are told apart by ``uid`` within a batch.
        pad_token_id: fills prompts and responses.
    """
    prompts = max(batch["prompts"].shape[1] for batch in batches)
    responses = max(batch["responses"].shape[1] for batch in batches)
    joined, offset = [], 0
    for batch in batches:
        widened = _widen(batch, prompts, responses, pad_token_id)
        joined.append(widened.with_columns({"uid": widened["uid"] + offset}))
        offset += int(batch["uid"].max()) + 1 if len(batch) else 0
    return DataProto.concat(joined)


def _widen(batch: DataProto, prompts: int, responses: int, pad_token_id: int) -> DataProto:
    left, right = prompts - batch["prompts"].shape[1], responses - batch["responses"].shape[1]
    if not left and not right:
        return batch
    columns: dict[str, torch.Tensor] = {}
    for name in {**_LEFT, **_RIGHT}:
        if name not in batch:
            continue
        filler = {**_LEFT, **_RIGHT}[name]
        sides = (left if name in _LEFT else 0, right if name in _RIGHT else 0)
        value = pad_token_id if filler == "pad" else 0
        columns[name] = torch.nn.functional.pad(batch[name], sides, value=value)
    columns["position_ids"] = (columns["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return batch.with_columns(columns)


def join_groups(kept: Sequence[DataProto], wanted: int, pad_token_id: int) -> DataProto:
    """Return the first ``wanted`` groups of several generated batches.

    Args:
        kept: generated rows that stay, at least one in all.
        wanted: groups at most.
        pad_token_id: fills prompts and responses.
    """
    return first_groups(join_generated([batch for batch in kept if len(batch)], pad_token_id), wanted)


def first_rows(batch: DataProto) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first row of each group, and the place of each row's group among them, both int64."""
    groups, place = batch["uid"].unique(return_inverse=True)
    rows = torch.arange(len(place)).flip(0)
    first = torch.empty(len(groups), dtype=torch.int64).scatter_(0, place.flip(0), rows)
    return first, place
