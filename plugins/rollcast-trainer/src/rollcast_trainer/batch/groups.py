"""Groups: the rows of one prompt, which share a ``uid``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollcast.protocol import DataProto

__all__ = ["first_groups", "first_rows", "groups_that_differ", "join_groups", "mean_interval"]

#: Quantile of the normal distribution for an interval of 95 %.
_Z = 1.959964


def groups_that_differ(uid: torch.Tensor, score: torch.Tensor, counted: torch.Tensor | None = None) -> torch.Tensor:
    """Return a mask (bool ``[B]``) of the rows whose group has at least two different scores.

    Args:
        uid: group of each row, int64 ``[B]``.
        score: score of each row, float ``[B]``.
        counted: rows whose scores are compared, bool ``[B]``; None for all.
    """
    groups = int(uid.max()) + 1 if len(uid) else 0
    places, scores = (uid, score) if counted is None else (uid[counted], score[counted])
    low = torch.full((groups,), torch.inf).scatter_reduce(0, places, scores, "amin")
    high = torch.full((groups,), -torch.inf).scatter_reduce(0, places, scores, "amax")
    return (high > low)[uid]


def mean_interval(uid: torch.Tensor, score: torch.Tensor) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean score, by the normal approximation over the means of the groups.

    Answers to one prompt are not independent of each other, so the groups count and not the rows.

    Args:
        uid: group of each row, int64 ``[B]``.
        score: score of each row, float ``[B]``.

    Returns:
        Lower and upper bound; None with fewer than two groups.
    """
    groups, place = torch.unique(uid, return_inverse=True)
    sizes = torch.bincount(place)
    if len(groups) < 2:
        return None
    values = score.double()
    means = torch.zeros(len(groups), dtype=torch.float64).index_add_(0, place, values) / sizes
    half = _Z * float(means.std()) / len(groups) ** 0.5
    return float(values.mean()) - half, float(values.mean()) + half


def first_groups(batch: DataProto, count: int) -> DataProto:
    """Return the rows of the first ``count`` groups, renumbered from 0."""
    groups, uid = batch["uid"].unique(return_inverse=True)
    chosen = batch.with_columns({"uid": uid})
    return chosen if len(groups) <= count else chosen.select_idxs((uid < count).nonzero().flatten())


def join_groups(batches: Sequence[DataProto], wanted: int) -> DataProto:
    """Return the first ``wanted`` groups of several generated batches.

    Args:
        batches: generated batches with the rows to keep, at least one row in total; ``uid`` is unique within a batch
            only.
        wanted: maximum number of groups.
    """
    joined: list[DataProto] = []
    names = [name for name in ("uid", "rollout_index") if name in batches[0]]
    offsets = dict.fromkeys(names, 0)
    for batch in batches:
        if len(batch):
            joined.append(batch.with_columns({name: batch[name] + offsets[name] for name in names}))
            offsets = {name: offsets[name] + int(batch[name].max()) + 1 for name in names}
    return first_groups(DataProto.concat(joined), wanted)


def first_rows(batch: DataProto) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first row of each group, and for each row the index of its group; both int64."""
    groups, place = batch["uid"].unique(return_inverse=True)
    rows = torch.arange(len(place)).flip(0)
    first = torch.empty(len(groups), dtype=torch.int64).scatter_(0, place.flip(0), rows)
    return first, place
