"""Copies of a run's checkpoints at a URL, written in the background, and the way back to a machine that has none."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from rollcast.contracts.storage import RemoteFolder
from rollcast.errors import CheckpointError, ResourceError
from rollcast_trainer.run.run_dir import CONFIG_FILE, LATEST, Checkpoints, replacing_folder

__all__ = ["RemoteCheckpoints"]

logger = logging.getLogger(__name__)
_STEP = re.compile(r"step_(\d+)")


class RemoteCheckpoints:
    """The checkpoints of a run at ``trainer.default_hdfs_dir``, as they are in its run directory.

    ``latest`` is written after a checkpoint is complete, so a reader that follows it never sees a partial one. One
    checkpoint is copied at a time.

    Args:
        url: URL of the copy of the run directory.
        run_dir: the run directory.
    """

    def __init__(self, url: str, run_dir: Path) -> None:
        self._remote = RemoteFolder(url, "trainer.default_hdfs_dir")
        self._run_dir = run_dir
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="rollcast-upload")
        self._copying: Future[None] | None = None
        self._failure: ResourceError | None = None

    def fetch(self) -> None:
        """Copy the newest checkpoint and the config into a run directory without checkpoints.

        Raises:
            CheckpointError: they cannot be read.
        """
        checkpoints = Checkpoints(self._run_dir / "checkpoints")
        if checkpoints.steps():
            return
        try:
            newest = self._remote.read_text(f"checkpoints/{LATEST}")
            if newest is None:
                return
            name = newest.strip()
            if _STEP.fullmatch(name) is None:
                raise CheckpointError(f"{self._remote.url}/checkpoints/{LATEST} names {name!r:.40}, not a checkpoint")
            logger.info("fetching %s from %s", name, self._remote.url)
            self._remote.download(CONFIG_FILE, self._run_dir / CONFIG_FILE)
            checkpoints.folder.mkdir(parents=True, exist_ok=True)
            with replacing_folder(checkpoints.folder / name) as folder:
                folder.rmdir()  # a copy into an existing folder would make another one within it
                self._remote.download(f"checkpoints/{name}", folder)
        except ResourceError as error:
            raise CheckpointError(f"trainer.default_hdfs_dir: {error}") from error

    def push(self, step: int, steps: Iterable[int]) -> None:
        """Start copying a complete checkpoint, after the previous one is copied.

        Args:
            step: step of the checkpoint.
            steps: steps of the checkpoints in the run directory; other ones are removed from the copy.
        """
        self.wait()
        self._copying = self._executor.submit(self._push, step, frozenset({step, *steps}))

    def _push(self, step: int, steps: frozenset[int]) -> None:
        name = f"step_{step}"
        self._remote.upload(self._run_dir / CONFIG_FILE, CONFIG_FILE)
        self._remote.upload(self._run_dir / "checkpoints" / name, f"checkpoints/{name}")
        self._remote.write_text(f"checkpoints/{LATEST}", f"{name}\n")
        for entry in self._remote.names("checkpoints"):
            match = _STEP.fullmatch(entry)
            if match and int(match[1]) not in steps:
                self._remote.remove(f"checkpoints/{entry}")

    def wait(self) -> None:
        """Wait until the checkpoint in flight is copied; a failure is logged, and raised by :meth:`close`.

        Training goes on: the checkpoint is complete in the run directory.
        """
        copying, self._copying = self._copying, None
        if copying is None:
            return
        try:
            copying.result()
            self._failure = None
        except ResourceError as error:
            self._failure = error
            logger.warning("a checkpoint is in %s only: %s", self._run_dir / "checkpoints", error)

    def close(self, export: Path | None = None) -> None:
        """Finish copying, and copy the exported model.

        Args:
            export: folder of the exported model; None if there is none.

        Raises:
            CheckpointError: the newest checkpoint or the model could not be copied.
        """
        self.wait()
        self._executor.shutdown()
        failure = self._failure
        if export is not None:
            try:
                self._remote.upload(export, export.name)
            except ResourceError as error:
                failure = error
        if failure is not None:
            raise CheckpointError(f"trainer.default_hdfs_dir: {failure}") from failure

    def abandon(self) -> None:
        """Finish the checkpoint in flight after the run has failed."""
        self.wait()
        self._executor.shutdown()
