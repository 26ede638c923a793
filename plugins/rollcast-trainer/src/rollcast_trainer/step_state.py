"""What a training step hands from one of its named steps to the next."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollcast.protocol import DataProto

__all__ = ["StepState"]


@dataclass
class StepState:
    """A training step between its named steps: the batch so far and the metrics so far."""

    batch: DataProto
    metrics: dict[str, float] = field(default_factory=dict)
    prompts: DataProto | None = None
