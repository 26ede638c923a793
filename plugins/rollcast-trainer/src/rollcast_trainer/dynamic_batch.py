"""Dynamic batches: groups whose samples all score alike teach nothing, and others are sampled in their place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollcast.protocol import DataProto

__all__ = ["first_groups", "groups_that_differ", "join_generated", "join_groups", "widen_prompts"]

_LEFT = {"prompts": "pad", "input_ids": "pad", "attention_mask": 0}
_RIGHT = {
    "responses": "pad",
    "input_ids": "pad",
    "attention_mask": 0,
    "response_mask": 0,
    "rollout_log_probs": 0,
    "token_level_scores": 0,
}


def groups_that_differ(batch: DataProto) -> torch.Tensor:
    """Rows (bool ``[B]``) of groups in which not all scores are the same; a group is a ``uid``."""
    score, uid = batch["token_level_scores"].sum(-1), batch["uid"]
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


def widen_prompts(prompts: DataProto, width: int, pad_token_id: int) -> DataProto:
    """Prompts ``[B, P]`` padded on the left to ``width``."""
    missing = width - prompts["input_ids"].shape[1]
    if not missing:
        return prompts
    ids, mask = (
        torch.nn.functional.pad(prompts[name], (missing, 0), value=value)
        for name, value in (("input_ids", pad_token_id), ("attention_mask", 0))
    )
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return prompts.with_columns({"input_ids": ids, "attention_mask": mask, "position_ids": positions})


def join_groups(
    kept: Sequence[tuple[DataProto, DataProto]], wanted: int, pad_token_id: int
) -> tuple[DataProto, DataProto]:
    """The first ``wanted`` groups of several batches, and their prompts in the groups' order.

    Args:
        kept: generated rows that stay, and the prompts of their batch; some rows stay.
        wanted: groups at most.
        pad_token_id: fills prompts and responses.
    """
    filled = [(batch, source) for batch, source in kept if len(batch)]
    prompts = [source.select_idxs(batch["uid"].unique()) for batch, source in filled]
    width = max(part["input_ids"].shape[1] for part in prompts)
    widened = DataProto.concat([widen_prompts(part, width, pad_token_id) for part in prompts])
    joined = first_groups(join_generated([batch for batch, _ in filled], pad_token_id), wanted)
    return joined, widened.slice(0, min(wanted, len(widened)))
