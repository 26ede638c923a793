"""How many ranks an engine lets share one part of a batch, from its own config keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollcast_trainer.schemas import ActorConfig

__all__ = ["ParallelSizes", "data_parallel_size", "pass_tokens"]


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


def pass_tokens(actor: ActorConfig, engine: Any) -> int | None:
    """The token budget of a pass, on all devices that share its rows; None without ``use_dynamic_bsz``."""
    return actor.ppo_max_token_len_per_gpu * ParallelSizes.read(engine).context if actor.use_dynamic_bsz else None
