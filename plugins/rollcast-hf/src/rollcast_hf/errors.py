"""Errors of generation with transformers."""

from __future__ import annotations

from rollcast.errors import RolloutError, WeightSyncError

__all__ = ["GenerationError", "WeightUpdateError"]


class GenerationError(RolloutError):
    """Generation failed for a batch; every request of the batch raises this error with the cause chained."""


class WeightUpdateError(WeightSyncError, ValueError):
    """New weights do not fit the model; the message names the tensor."""
