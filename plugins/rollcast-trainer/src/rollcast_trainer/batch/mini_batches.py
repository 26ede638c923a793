"""Mini-batches: drawing them from a batch, and arranging their rows into shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rollcast.contracts.algorithm import Denominators
from rollcast.protocol import DataProto, Jagged
from rollcast_algorithms.aggregation import SEQUENCE_TOKENS
from rollcast_trainer.batch.balance import deal_rows
from rollcast_trainer.batch.rollouts import ROLLOUT, rollouts_of

__all__ = ["UpdatePlan", "count_denominators", "draw_mini_batches", "plan_update", "without_advantage"]


@dataclass(frozen=True)
class UpdatePlan:
    """Mini-batches of a rank's rows: contiguous, with the same number of rows on every rank.

    Attributes:
        rows_per_rank: rows of each mini-batch on each rank.
        denominators: counts of each whole mini-batch, including rows that are not sent.
        epochs: passes over all mini-batches.
    """

    rows_per_rank: Sequence[int]
    denominators: Sequence[Denominators]
    epochs: int = 1


def count_denominators(tokens: torch.Tensor, max_tokens: int) -> Denominators:
    """Return the counts of a mini-batch from the masked token count of each rollout, int64 ``[R]``."""
    return Denominators(
        tokens=float(tokens.sum()),
        sequences=float((tokens > 0).sum()),
        max_tokens=float(max_tokens),
    )


def draw_mini_batches(
    rows: int, count: int, epochs: int, seed: int | None, rollouts: torch.Tensor | None = None
) -> tuple[list[torch.Tensor], int]:
    """Return the row indices (int64) of each mini-batch, and how often to iterate over them.

    Rollouts are drawn one by one: the samples of a prompt may fall into different mini-batches, but all rows of a
    rollout stay in one.

    Args:
        rows: rows of the batch.
        count: mini-batches per epoch.
        epochs: passes over the batch.
        seed: seed of the order, which differs in each epoch; None keeps the order of the batch.
        rollouts: rollout of each row, int64 ``[B]`` from 0; None if each row is a rollout.
    """
    if rollouts is not None:
        drawn, repeats = draw_mini_batches(int(rollouts.max()) + 1, count, epochs, seed)
        order = rollouts.argsort(stable=True)
        members = Jagged.from_lengths(order, rollouts.bincount())
        return [members.take(part).values for part in drawn], repeats
    if seed is None:
        return list(torch.arange(rows).chunk(count)), epochs
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(rows, generator=generator) for _ in range(epochs)]
    return [part for order in orders for part in order.chunk(count)], 1


def plan_update(
    batch: DataProto,
    mini_batches: Sequence[torch.Tensor],
    dp_size: int,
    max_tokens: int,
    epochs: int = 1,
    skip_rows: torch.Tensor | None = None,
    lengths: Sequence[int] | None = None,
) -> tuple[DataProto, UpdatePlan]:
    """Arrange rows so that equal consecutive shards contain each rank's part of every mini-batch.

    Args:
        batch: ``B`` rows with at least ``response_mask``, and ``rollout_index`` if rollouts have several rows.
        mini_batches: row indices (int64) of each mini-batch, none of them empty.
        dp_size: number of shards; the number of rows need not be a multiple of it.
        max_tokens: length in tokens of the longest response that the run allows.
        epochs: passes of the workers over all mini-batches.
        skip_rows: bool ``[B]``; these rows add nothing to the gradient and are not sent, but still count in the
            denominators.
        lengths: tokens of each row; :func:`deal_rows` then balances the rows of a mini-batch over the shards. Without
            lengths the rows are dealt round-robin.

    Returns:
        The arranged batch, and the plan for the workers. Padding rows repeat another row under a zero mask. If rollouts
            have several rows, ``rollout_index`` is replaced by ``sequence_tokens``: the tokens of each row's rollout in
            its mini-batch.
    """
    tokens = Jagged.of(batch["response_mask"], "response_mask").sums()
    rollouts = rollouts_of(batch)
    batch = batch.drop([ROLLOUT]) if ROLLOUT in batch else batch
    blocks: list[list[int]] = [[] for _ in range(dp_size)]
    filler: list[list[bool]] = [[] for _ in range(dp_size)]
    sequence_tokens: list[list[int]] = [[] for _ in range(dp_size)]
    rows_per_rank: list[int] = []
    denominators: list[Denominators] = []
    run = -(-len(batch) // dp_size)
    for rows in mini_batches:
        trained = rows if skip_rows is None else rows[~skip_rows[rows]]
        sums = _rollout_tokens(tokens, rows, rollouts)
        denominators.append(_denominators(tokens, rows, trained, max_tokens, sums))
        own = tokens if rollouts is None else sums[rollouts]
        indices = trained.tolist()
        # At least one row per rank: ranks that share a model run every pass together.
        per_rank = max(-(-len(indices) // dp_size), 1)
        missing = per_rank * dp_size - len(indices)
        real = [True] * len(indices) + [False] * missing
        candidates = indices or rows.tolist()
        indices += [candidates[0] if lengths is None else min(candidates, key=lengths.__getitem__)] * missing
        rows_per_rank.append(per_rank)
        weights = [0] * len(indices) if lengths is None else [lengths[index] for index in indices]
        # The workers hold their columns in batch order, one contiguous run of rows per rank.
        homes = [index // run for index in indices]
        for rank, part in enumerate(deal_rows(weights, dp_size, homes)):
            blocks[rank] += [indices[place] for place in part]
            filler[rank] += [real[place] for place in part]
            sequence_tokens[rank] += own[[indices[place] for place in part]].tolist()
    order = torch.tensor([index for block in blocks for index in block], dtype=torch.int64)
    keep = torch.tensor([flag for block in filler for flag in block], dtype=torch.bool)
    arranged = batch.select_idxs(order)
    if rollouts is not None:
        spread = torch.tensor([count for block in sequence_tokens for count in block], dtype=torch.int64)
        arranged = arranged.with_columns({SEQUENCE_TOKENS: spread})
    if not bool(keep.all()):
        mask = Jagged.of(arranged["response_mask"])
        arranged = arranged.with_columns({"response_mask": mask.like(mask.values * keep[mask.rows])})
    return arranged, UpdatePlan(tuple(rows_per_rank), tuple(denominators), epochs)


def _rollout_tokens(tokens: torch.Tensor, rows: torch.Tensor, rollouts: torch.Tensor | None) -> torch.Tensor:
    """Return the tokens of each rollout within the mini-batch of these rows, int64; 0 for rollouts outside it."""
    if rollouts is None:
        return tokens[rows]
    return tokens.new_zeros(int(rollouts.max()) + 1).index_add_(0, rollouts[rows], tokens[rows])


def _denominators(
    tokens: torch.Tensor, rows: torch.Tensor, trained: torch.Tensor, max_tokens: int, sequences: torch.Tensor
) -> Denominators:
    whole = count_denominators(sequences, max_tokens)
    if len(trained) == len(rows):
        return whole
    return replace(whole, present_tokens=float(tokens[trained].sum()))


def without_advantage(batch: DataProto) -> torch.Tensor:
    """Return a mask (bool ``[B]``) of the rows whose advantage is zero at every token."""
    advantages = Jagged.of(batch["advantages"], "advantages")
    return advantages.with_values(advantages.values != 0).sums() == 0
