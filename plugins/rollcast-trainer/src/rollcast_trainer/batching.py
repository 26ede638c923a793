"""The batch algebra: how prompts become rows, rows mini-batches, and mini-batches shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rollcast.contracts.algorithm import Denominators
from rollcast.errors import ConfigError
from rollcast.protocol import DataProto
from rollcast_trainer.balancing import deal_rows
from rollcast_trainer.workers import UpdatePlan

__all__ = ["BatchAlgebra", "count_denominators", "draw_mini_batches", "plan_update"]


@dataclass(frozen=True)
class BatchAlgebra:
    """The sizes of one training step.

    Attributes:
        prompts: prompts a step (``data.train_batch_size``).
        samples: responses for each prompt (``rollout.n``).
        mini_batch_prompts: prompts an optimizer step (``actor.ppo_mini_batch_size``).
        epochs: passes over the batch (``actor.ppo_epochs``).
        dp_size: data-parallel ranks.
        micro_batch_rows: rows a forward and backward pass; None for a rank's whole part.
        micro_batch_tokens: token budget of a pass, which takes precedence; None without one.
    """

    prompts: int
    samples: int
    mini_batch_prompts: int
    epochs: int
    dp_size: int
    micro_batch_rows: int | None = None
    micro_batch_tokens: int | None = None

    @property
    def rows(self) -> int:
        """Responses a step."""
        return self.prompts * self.samples

    @property
    def mini_batches(self) -> int:
        """Optimizer steps an epoch."""
        return self.prompts // self.mini_batch_prompts

    @property
    def rows_per_rank(self) -> int:
        """Rows of a mini-batch on each rank, those that only fill up included."""
        return -(-self.mini_batch_prompts * self.samples // self.dp_size)

    def check(self) -> None:
        """Refuse sizes that do not fit.

        Raises:
            ConfigError: with the nearest sizes that do.
        """
        if self.prompts % self.mini_batch_prompts:
            divisors = [size for size in range(1, self.prompts + 1) if self.prompts % size == 0]
            mini_batches = _nearest(self.mini_batch_prompts, divisors)
            down = self.prompts // self.mini_batch_prompts * self.mini_batch_prompts
            batches = _nearest(self.prompts, [size for size in (down, down + self.mini_batch_prompts) if size])
            raise ConfigError(
                f"data.train_batch_size={self.prompts} prompts do not divide into mini-batches of "
                f"actor.ppo_mini_batch_size={self.mini_batch_prompts}; nearest valid: "
                f"actor.ppo_mini_batch_size={mini_batches}, or data.train_batch_size={batches}"
            )

    def describe(self) -> str:
        """The algebra in one line."""
        if self.micro_batch_tokens is not None:
            passes = f"passes of at most {_count(self.micro_batch_tokens, 'token')}"
        elif self.micro_batch_rows is not None:
            passes = f"passes of at most {_count(self.micro_batch_rows, 'row')}"
        else:
            passes = "one pass"
        return (
            f"{_count(self.prompts, 'prompt')} x {_count(self.samples, 'sample')} = {_count(self.rows, 'row')} a step; "
            f"{_count(self.mini_batches, 'mini-batch')} of {_count(self.mini_batch_prompts * self.samples, 'row')} x "
            f"{_count(self.epochs, 'epoch')} = {_count(self.mini_batches * self.epochs, 'optimizer step')}; "
            f"{_count(self.rows_per_rank, 'row')} of a mini-batch on each of {_count(self.dp_size, 'rank')}, "
            f"in {passes}"
        )


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('batch') else 's'}"


def _nearest(wanted: int, valid: Sequence[int]) -> str:
    below = [size for size in valid if size < wanted]
    above = [size for size in valid if size > wanted]
    return " or ".join(str(size) for size in (*below[-1:], *above[:1]))


def count_denominators(response_mask: torch.Tensor, max_tokens: int) -> Denominators:
    """Counts of a mini-batch from its mask ``[B, T]``."""
    return Denominators(
        tokens=float(response_mask.sum()),
        sequences=float((response_mask.sum(-1) > 0).sum()),
        max_tokens=float(max_tokens),
    )


def draw_mini_batches(rows: int, count: int, epochs: int, seed: int | None) -> tuple[list[torch.Tensor], int]:
    """Row indices (int64) of each mini-batch, and how often to go through them all.

    Rows are drawn one by one: the samples of a prompt may fall into different mini-batches.

    Args:
        rows: rows of the batch.
        count: mini-batches an epoch.
        epochs: passes over the batch.
        seed: of the order, which is new in each epoch; None for the order of the batch.
    """
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
    """Arrange rows so that equal shards in a row give each rank its part of every mini-batch.

    Args:
        batch: ``B`` rows with at least ``response_mask`` ``[B, T]``.
        mini_batches: row indices (int64) of each mini-batch, none of them empty.
        dp_size: shards; any number, the rows need not divide.
        max_tokens: the longest response that the run allows.
        epochs: how often the workers go through all mini-batches.
        skip_rows: bool ``[B]``; these rows add nothing to the gradient and are not sent. They stay
            in the denominators.
        lengths: tokens of each row; a mini-batch's rows are then spread over the shards by
            :func:`deal_rows`, and without them dealt out in turn.

    Returns:
        The arranged batch, and the plan for the workers. Rows that fill up a rank's part repeat
        another row under a zero mask.
    """
    mask = batch["response_mask"]
    blocks: list[list[int]] = [[] for _ in range(dp_size)]
    filler: list[list[bool]] = [[] for _ in range(dp_size)]
    rows_per_rank: list[int] = []
    denominators: list[Denominators] = []
    for rows in mini_batches:
        kept = rows if skip_rows is None else rows[~skip_rows[rows]]
        denominators.append(_denominators(mask, rows, kept, max_tokens))
        indices = kept.tolist()
        # At least one row each: ranks that share a model run every pass together.
        per_rank = max(-(-len(indices) // dp_size), 1)
        missing = per_rank * dp_size - len(indices)
        real = [True] * len(indices) + [False] * missing
        candidates = indices or rows.tolist()
        indices += [candidates[0] if lengths is None else min(candidates, key=lengths.__getitem__)] * missing
        rows_per_rank.append(per_rank)
        weights = [0] * len(indices) if lengths is None else [lengths[index] for index in indices]
        for rank, part in enumerate(deal_rows(weights, dp_size)):
            blocks[rank] += [indices[place] for place in part]
            filler[rank] += [real[place] for place in part]
    order = torch.tensor([index for block in blocks for index in block], dtype=torch.int64)
    keep = torch.tensor([flag for block in filler for flag in block], dtype=torch.bool)
    arranged = batch.select_idxs(order)
    if not bool(keep.all()):
        masked = arranged["response_mask"] * keep.unsqueeze(-1).to(arranged["response_mask"].dtype)
        arranged = arranged.with_columns({"response_mask": masked})
    return arranged, UpdatePlan(tuple(rows_per_rank), tuple(denominators), epochs)


def _denominators(mask: torch.Tensor, rows: torch.Tensor, kept: torch.Tensor, max_tokens: int) -> Denominators:
    whole = count_denominators(mask[rows], max_tokens)
    if len(kept) == len(rows):
        return whole
    return replace(whole, present_tokens=float(mask[kept].sum()))
