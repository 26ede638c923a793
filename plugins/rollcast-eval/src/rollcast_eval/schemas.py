"""Configuration of the commands; importable without torch."""

from __future__ import annotations

from dataclasses import dataclass

from rollcast.errors import ConfigError

__all__ = ["SampleConfig"]


@dataclass
class SampleConfig:
    """Keys of ``rollcast generate`` and ``rollcast eval`` beside the sections of a run.

    Attributes:
        seed: seed of the samples; a prompt's samples do not depend on the other prompts.
        chunk_size: prompts between two writes of the output.
    """

    seed: int = 0
    chunk_size: int = 256

    def check(self) -> None:
        """Refuse values out of range.

        Raises:
            ConfigError: names the key and its range.
        """
        if self.chunk_size < 1:
            raise ConfigError(f"sample.chunk_size is {self.chunk_size}; it must be at least 1")
