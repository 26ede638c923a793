"""The training prompts of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollcast.protocol import DataProto
from rollcast_data.loader import EpochIterator

__all__ = ["Prompts"]


class Prompts:
    """Batches of prompts, with the data position before the last batch.

    Args:
        batches: batches of the run's dataset.
    """

    def __init__(self, batches: EpochIterator) -> None:
        self._batches = batches
        #: Position before the last drawn batch.
        self.position: Mapping[str, Any] = batches.state_dict()

    def draw(self) -> DataProto:
        """Return the next batch."""
        self.position = self._batches.state_dict()
        return next(self._batches)

    def rewind(self, position: Mapping[str, Any]) -> None:
        """Continue from an earlier position.

        Raises:
            CheckpointError: the position does not belong to this data.
        """
        self._batches.load_state_dict(position)
