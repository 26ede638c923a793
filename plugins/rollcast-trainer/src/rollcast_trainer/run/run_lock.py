"""The lock of a run directory: only one run at a time writes into it."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from functools import cache
from pathlib import Path

from rollcast.errors import CheckpointError, ResourceError

__all__ = ["LOCK_FILE", "RunLock"]

LOCK_FILE = ".lock"

logger = logging.getLogger(__name__)
#: File descriptors of the locks that this process holds.
_held: set[int] = set()


class RunLock:
    """A lock on a run directory, held until :meth:`release` or the death of this process.

    Args:
        run_dir: an existing directory.

    Raises:
        ResourceError: another run holds the lock; the message names its host and process.
        CheckpointError: the lock file cannot be written.
    """

    def __init__(self, run_dir: Path) -> None:
        _close_in_children()
        self._file = run_dir / LOCK_FILE
        try:
            self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise CheckpointError(f"{self._file} cannot be opened: {error}") from error
        _held.add(self._descriptor)
        try:
            self._take(run_dir)
        except BaseException:
            self.release()
            raise

    def _take(self, run_dir: Path) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(self._descriptor, 256, 0).decode("utf-8", "replace").strip()
            raise ResourceError(
                f"run_dir={run_dir} is in use by another run ({owner or 'which has just started'}). "
                "Wait for it, stop it, or choose another run_dir"
            ) from error
        except OSError as error:  # a file system without locks
            logger.warning("%s cannot be locked (%s): start no second run in %s", self._file, error, run_dir)
            return
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"host {socket.gethostname()}, process {os.getpid()}\n".encode(), 0)
        except OSError as error:
            raise CheckpointError(f"{self._file} cannot be written: {error}") from error

    def release(self) -> None:
        """Release the lock; may be called twice."""
        if self._descriptor >= 0:
            _held.discard(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1


@cache
def _close_in_children() -> None:
    # A forked child, such as a data loader's, inherits the lock and would keep it after its parent's death.
    os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()
