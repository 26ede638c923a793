"""Schema of the config's ``rollout`` section for ``rollout=hf``; importable without torch."""

from __future__ import annotations

from rollcast.contracts.config import Positive, config
from rollcast.contracts.sections import RolloutConfig

__all__ = ["HfRolloutConfig"]


@config
class HfRolloutConfig(RolloutConfig):
    """Keys of the transformers rollout."""

    name: str = "hf"
    """Registry name of the rollout."""
    weight_sync: str = "in_process"
    """Registry name of the weight sync."""
    max_batch_size: Positive = 1024
    """Maximum number of sequences generated at once."""
