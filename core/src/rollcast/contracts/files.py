"""Atomic file replacement, and lookup of the newest checkpoint of a run directory."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

__all__ = ["find_newest_checkpoint", "replace_file"]

_STEP = re.compile(r"step_(\d+)")


def replace_file(path: Path, content: str | bytes) -> None:
    """Write ``content`` to ``path`` atomically: a reader sees the old file or the new one, never a partial file.

    The file and its folder are flushed to disk, so this holds after a power failure too.

    Args:
        path: Path of the file. Only one process may write to it at a time.
        content: Bytes, or text to encode as UTF-8 with lone surrogates as backslash escapes.

    Raises:
        OSError: The file cannot be written; the old file is unchanged.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Flush the folder's entries to disk, which makes a rename durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot flush folders; the file itself is on disk.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def find_newest_checkpoint(run_dir: Path) -> Path | None:
    """Return the checkpoint with the highest step; every ``step_N`` is complete, because it is written atomically."""
    checkpoints = [
        (int(match[1]), path) for path in run_dir.glob("checkpoints/*") if (match := _STEP.fullmatch(path.name))
    ]
    return max(checkpoints)[1] if checkpoints else None
