"""The batch algebra: how prompts become rows, rows mini-batches, and mini-batches shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rollcast.contracts.algorithm import Denominators
from rollcast.errors import ConfigError
from rollcast.protocol import DataProto
from rollcast_trainer.workers import UpdatePlan

__all__ = ["BatchAlgebra", "denominators_of", "plan_update"]


@dataclass(frozen=True)
class BatchAlgebra:
    """The sizes of one training step.

    Attributes:
        prompts: prompts a step (``data.train_batch_size``).
        samples: responses for each prompt (``rollout.n``).
        mini_batch_prompts: prompts an optimizer step (``actor.ppo_mini_batch_size``).
        epochs: passes over the batch (``actor.ppo_epochs``).
        dp_size: data-parallel ranks.
    """

    prompts: int
    samples: int
    mini_batch_prompts: int
    epochs: int
    dp_size: int

    @property
    def rows(self) -> int:
        """Responses a step."""
        return self.prompts * self.samples

    @property
    def mini_batches(self) -> int:
        """Optimizer steps an epoch."""
        return self.prompts // self.mini_batch_prompts

    def check(self) -> None:
        """Refuse sizes that do not fit.

        Raises:
            ConfigError: with the nearest sizes that do.
        """
        for key, value in (
            ("data.train_batch_size", self.prompts),
            ("rollout.n", self.samples),
            ("actor.ppo_mini_batch_size", self.mini_batch_prompts),
            ("actor.ppo_epochs", self.epochs),
        ):
            if value < 1:
                raise ConfigError(f"{key} is {value}; it must be at least 1")
        if self.prompts % self.mini_batch_prompts:
            divisors = [size for size in range(1, self.prompts + 1) if self.prompts % size == 0]
            below = max((size for size in divisors if size < self.mini_batch_prompts), default=divisors[0])
            above = min((size for size in divisors if size > self.mini_batch_prompts), default=divisors[-1])
            rounded = max(round(self.prompts / self.mini_batch_prompts), 1) * self.mini_batch_prompts
            raise ConfigError(
                f"data.train_batch_size={self.prompts} prompts do not divide into mini-batches of "
                f"actor.ppo_mini_batch_size={self.mini_batch_prompts}; nearest valid: "
                f"actor.ppo_mini_batch_size={below} or {above}, or data.train_batch_size={rounded}"
            )

    def describe(self) -> str:
        """The algebra in one line."""
        return (
            f"{self.prompts} prompts x {self.samples} samples = {self.rows} rows a step; "
            f"{self.mini_batches} mini-batches of {self.mini_batch_prompts * self.samples} rows x {self.epochs} epochs "
            f"= {self.mini_batches * self.epochs} optimizer steps; "
            f"{-(-self.mini_batch_prompts * self.samples // self.dp_size)} rows of a mini-batch on each of "
            f"{self.dp_size} ranks"
        )


def denominators_of(response_mask: torch.Tensor, max_tokens: int) -> Denominators:
    """Counts of a mini-batch from its mask ``[B, T]``."""
    return Denominators(
        tokens=float(response_mask.sum()),
        sequences=float((response_mask.sum(-1) > 0).sum()),
        max_tokens=float(max_tokens),
    )


def plan_update(
    batch: DataProto,
    mini_batches: Sequence[torch.Tensor],
    dp_size: int,
    epochs: int,
    max_tokens: int,
    skip_rows: torch.Tensor | None = None,
) -> tuple[DataProto, UpdatePlan]:
    """Arrange rows so that a contiguous split into ``dp_size`` shards gives each rank its part of
    every mini-batch, whatever the number of ranks.

    Args:
        mini_batches: row indices (int64) of each mini-batch.
        skip_rows: bool ``[B]``; these rows add nothing to the gradient and are not sent. They stay
            in the denominators.

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
        denominators.append(denominators_of(mask[rows], max_tokens))
        kept = rows if skip_rows is None else rows[~skip_rows[rows]]
        indices = kept.tolist()
        per_rank = max(-(-len(indices) // dp_size), 1)
        missing = per_rank * dp_size - len(indices)
        real = [True] * len(indices) + [False] * missing
        indices += [int(rows[0])] * missing
        rows_per_rank.append(per_rank)
        for rank in range(dp_size):
            # Strided, so that the filler is spread over the ranks.
            blocks[rank] += indices[rank::dp_size]
            filler[rank] += real[rank::dp_size]
    order = torch.tensor([index for block in blocks for index in block], dtype=torch.int64)
    keep = torch.tensor([flag for block in filler for flag in block], dtype=torch.bool)
    arranged = batch.select_idxs(order)
    if not bool(keep.all()):
        masked = arranged["response_mask"] * keep.unsqueeze(-1).to(arranged["response_mask"].dtype)
        arranged = arranged.with_columns({"response_mask": masked})
    return arranged, UpdatePlan(tuple(rows_per_rank), tuple(denominators), epochs)
