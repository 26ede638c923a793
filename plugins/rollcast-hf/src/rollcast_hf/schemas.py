"""The config's ``rollout`` section when ``rollout=hf``; importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["HfRolloutConfig", "ValKwargs"]


@dataclass
class ValKwargs:
    """Sampling during validation; the trainer builds its requests from it.

    Attributes:
        temperature: 0 for greedy.
        top_p: nucleus mass, 1 for all.
        top_k: number of candidates; -1 or 0 for all.
        n: sequences per prompt.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    n: int = 1


@dataclass
class HfRolloutConfig:
    """Keys of the transformers rollout.

    Attributes:
        name: registry name of the rollout.
        mode: how it is placed; only ``hybrid``.
        weight_sync: registry name of the weight sync.
        n: sequences per training prompt; read by the trainer, as are the three keys below.
        temperature: of training samples; 0 for greedy.
        top_p: nucleus mass, 1 for all.
        top_k: number of candidates; -1 or 0 for all.
        max_batch_size: most sequences generated at once.
        val_kwargs: sampling during validation.
    """

    name: str = "hf"
    mode: str = "hybrid"
    weight_sync: str = "in_process"
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_batch_size: int = 1024
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)
