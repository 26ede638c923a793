"""What can go wrong while generating with transformers."""

from __future__ import annotations

from rollcast.errors import RollcastError

__all__ = ["GenerationError", "RequestError", "WeightUpdateError"]


class RequestError(RollcastError, ValueError):
    """A request that this model cannot serve; names the request and what is wrong with it."""


class GenerationError(RollcastError, RuntimeError):
    """The model run of a batch failed; every request of the batch gets this, with the cause chained."""


class WeightUpdateError(RollcastError, ValueError):
    """New weights do not fit the model; names the tensor."""
