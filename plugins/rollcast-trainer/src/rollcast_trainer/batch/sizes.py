"""Sizes of a training step: prompts, rows, mini-batches, and the ranks that share them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollcast.errors import ConfigError

__all__ = ["BatchAlgebra", "ParallelSizes", "data_parallel_size", "pass_tokens"]


@dataclass(frozen=True)
class ParallelSizes:
    """Ranks that work on the same rows.

    Attributes:
        tensor, pipeline: along the width of layers, and along the layers.
        context: along the tokens of a row.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    @classmethod
    def read(cls, engine: Any) -> ParallelSizes:
        """From the engine's keys (``actor.engine``), by their usual names; 1 for those that it does not have."""

        def size(key: str) -> int:
            return max(int(getattr(engine, key, None) or 1), 1)

        context = size("context_parallel_size") * size("ulysses_sequence_parallel_size")
        return cls(size("tensor_model_parallel_size"), size("pipeline_model_parallel_size"), context)

    @property
    def model(self) -> int:
        """Ranks over which the layers' weights are split."""
        return self.tensor * self.pipeline

    def data(self, ranks: int) -> int:
        """Parts of a batch that ``ranks`` ranks compute at the same time, at least 1."""
        return max(ranks // (self.model * self.context), 1)


def data_parallel_size(engine: Any, ranks: int) -> int:
    """Into how many shards a batch is split, by the engine's own keys (``actor.engine``)."""
    return ParallelSizes.read(engine).data(ranks)


def pass_tokens(actor: Any, engine: Any) -> int | None:
    """The token budget of a pass, on all devices that share its rows; None without ``use_dynamic_bsz``."""
    return actor.ppo_max_token_len_per_gpu * ParallelSizes.read(engine).context if actor.use_dynamic_bsz else None


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
