"""The config's ``rollout`` section when ``rollout=hf``; importable without torch."""

from __future__ import annotations

from dataclasses import dataclass

from rollcast.config.rollout import RolloutConfig

__all__ = ["HfRolloutConfig"]


@dataclass
class HfRolloutConfig(RolloutConfig):
    """Keys of the transformers rollout.

    Attributes:
        max_batch_size: most sequences generated at once.
    """

    name: str = "hf"
    weight_sync: str = "in_process"
    max_batch_size: int = 1024
