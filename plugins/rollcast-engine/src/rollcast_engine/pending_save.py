"""Checkpoints that a thread completes while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rollcast.errors import CheckpointError

__all__ = ["PendingSave"]


class PendingSave:
    """A checkpoint in flight.

    Args:
        path: folder of the checkpoint, for messages.
        write: function that completes the checkpoint; it starts at once, in a thread.
    """

    def __init__(self, path: Path, write: Callable[[], None]) -> None:
        self._path = path
        executor = ThreadPoolExecutor(1, "checkpoint")
        self._written = executor.submit(write)
        executor.shutdown(wait=False)

    def finish(self, wait: bool) -> bool:
        """Return True if the checkpoint is completely on disk.

        Raises:
            CheckpointError: it could not be written.
        """
        if not wait and not self._written.done():
            return False
        try:
            self._written.result()
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"checkpoint {self._path} could not be written: {error}") from error
        return True
