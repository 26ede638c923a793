"""Sizes of a training step: prompts, rows, mini-batches, and the ranks that share them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollcast.errors import ConfigError

__all__ = ["BatchAlgebra", "ParallelSizes", "data_parallel_size", "pass_tokens"]


@dataclass(frozen=True)
class ParallelSizes:
    """Degrees of parallelism within one model replica: the ranks that work on the same rows.

    Attributes:
        tensor, pipeline: tensor-parallel and pipeline-parallel size.
        context: ranks that split the tokens of a row.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    @classmethod
    def read(cls, engine: Any) -> ParallelSizes:
        """Read the sizes from the engine's keys (``actor.engine``); a key that the engine lacks counts as 1."""

        def size(key: str) -> int:
            return max(int(getattr(engine, key, None) or 1), 1)

        context = size("context_parallel_size") * size("ulysses_sequence_parallel_size")
        return cls(size("tensor_model_parallel_size"), size("pipeline_model_parallel_size"), context)

    @property
    def model(self) -> int:
        """Number of ranks that the model's weights are split over."""
        return self.tensor * self.pipeline

    def data(self, ranks: int) -> int:
        """Return the number of data-parallel shards on ``ranks`` ranks, at least 1."""
        return max(ranks // (self.model * self.context), 1)


def data_parallel_size(engine: Any, ranks: int) -> int:
    """Return the number of shards that a batch is split into, from the engine's keys (``actor.engine``)."""
    return ParallelSizes.read(engine).data(ranks)


def pass_tokens(actor: Any, engine: Any) -> int | None:
    """Return the token budget of a pass over all devices that share its rows; None without ``use_dynamic_bsz``."""
    return actor.ppo_max_token_len_per_gpu * ParallelSizes.read(engine).context if actor.use_dynamic_bsz else None


@dataclass(frozen=True)
class BatchAlgebra:
    """The sizes of one training step.

    Attributes:
        prompts: prompts per step (``data.train_batch_size``).
        samples: responses per prompt (``rollout.n``).
        mini_batch_prompts: prompts per optimizer step (``actor.ppo_mini_batch_size``).
        epochs: passes over the batch (``actor.ppo_epochs``).
        dp_size: data-parallel ranks.
        micro_batch_rows: rows per forward and backward pass; None takes all of a rank's rows at once.
        micro_batch_tokens: token budget of a pass, which takes precedence over rows; None for no budget.
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
        """Responses per step."""
        return self.prompts * self.samples

    @property
    def mini_batches(self) -> int:
        """Optimizer steps per epoch."""
        return self.prompts // self.mini_batch_prompts

    @property
    def rows_per_rank(self) -> int:
        """Rows of a mini-batch on each rank, padding included."""
        return -(-self.mini_batch_prompts * self.samples // self.dp_size)

    def check(self) -> None:
        """Check that the sizes divide.

        Raises:
            ConfigError: the batch does not divide into mini-batches; the message names the nearest valid sizes.
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
        """Return the sizes as one line for the log."""
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
