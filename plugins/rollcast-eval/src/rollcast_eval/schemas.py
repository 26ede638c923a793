"""Schema of ``rollcast generate`` and ``rollcast eval``; importable without torch."""

from __future__ import annotations

from dataclasses import field

from rollcast.contracts.config import Positive, config
from rollcast.contracts.engine import ModelConfig

__all__ = ["SampleConfig", "SampleRunConfig"]


@config
class SampleConfig:
    """Keys of ``rollcast generate`` and ``rollcast eval`` in addition to the sections of a run."""

    seed: int = 0
    """Seed of the samples; a prompt's samples do not depend on the other prompts."""
    chunk_size: Positive = 256
    """Number of prompts between two writes of the output."""


@config
class SampleRunConfig:
    """Sections of ``trainer=sample``."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    sample: SampleConfig = field(default_factory=SampleConfig)
    """The samples."""
