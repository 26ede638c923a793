"""Checkpoints of a run, written synchronously or while the workers go on training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rollcast import WorkerGroup
from rollcast.errors import RollcastError
from rollcast_trainer.run.remote_checkpoints import RemoteCheckpoints
from rollcast_trainer.run.run_dir import Checkpoints

__all__ = ["CheckpointSaver"]

logger = logging.getLogger(__name__)


class CheckpointSaver:
    """Writer of checkpoints: every group writes its part, and the checkpoint is complete when all have finished.

    Args:
        checkpoints: checkpoint folder of the run.
        groups: worker groups whose state is saved.
        in_background: let groups go on as soon as their state is copied; one checkpoint is in flight at a time.
        on_saved: called with step and folder of each completed checkpoint.
        remote: copies of the checkpoints at a URL; None for no copies.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        groups: Sequence[WorkerGroup],
        in_background: bool,
        on_saved: Callable[[int, str], None],
        remote: RemoteCheckpoints | None = None,
    ) -> None:
        self._checkpoints = checkpoints
        self._groups = groups
        self._in_background = in_background
        self._on_saved = on_saved
        self._remote = remote
        self._pending: tuple[int, AbstractContextManager[Path]] | None = None

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint, or start writing it in the background, after the previous one is complete.

        Raises:
            CheckpointError: this checkpoint or the previous one cannot be written; earlier checkpoints are intact.
        """
        self.settle(wait=True)
        if self._remote is not None:
            # Completing a checkpoint may remove the one that is being copied.
            self._remote.wait()
        writing = self._checkpoints.writing(step, state)
        self._pending = (step, writing)
        folder = str(writing.__enter__().resolve())
        try:
            for group in self._groups:
                (group.start_checkpoint if self._in_background else group.save_checkpoint)(folder)
        except BaseException as error:
            self._give_up(error)
            raise
        self.settle(wait=not self._in_background)

    def settle(self, wait: bool = False) -> None:
        """Complete the checkpoint in flight if all of it is written.

        Args:
            wait: block until it is written.

        Raises:
            CheckpointError: it could not be written; earlier checkpoints are intact.
        """
        if self._pending is None:
            return
        try:
            written = [group.finish_checkpoint(wait) for group in self._groups]
        except BaseException as error:
            self._give_up(error)
            raise
        if all(all(ranks) for ranks in written):
            (step, writing), self._pending = self._pending, None
            writing.__exit__(None, None, None)
            if self._remote is not None:
                self._remote.push(step, self._checkpoints.steps())
            self._on_saved(step, str(self._checkpoints.path(step)))

    def rescue(self) -> None:
        """Try to complete the checkpoint in flight after the run has failed; log a warning if that fails."""
        try:
            self.settle(wait=True)
        except RollcastError as error:
            logger.warning("the checkpoint that was under way is lost: %s", error)

    def _give_up(self, error: BaseException) -> None:
        """Remove the unfinished checkpoint; an OSError is re-raised as CheckpointError."""
        if self._pending is not None:
            (_, writing), self._pending = self._pending, None
            writing.__exit__(type(error), error, error.__traceback__)
