"""What can go wrong while generating with transformers."""

from __future__ import annotations

from rollcast.errors import RolloutError, WeightSyncError

__all__ = ["GenerationError", "WeightUpdateError"]


class GenerationError(RolloutError):
    """The model run of a batch failed; every request of the batch gets this, with the cause chained."""


class WeightUpdateError(WeightSyncError, ValueError):
    """New weights do not fit the model; names the tensor."""
