"""Atomic replacement of files, and the newest checkpoint of a run directory."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

__all__ = ["find_newest_checkpoint", "replace_file"]

_STEP = re.compile(r"step_(\d+)")


def replace_file(path: Path, content: str | bytes) -> None:
    """Write ``content`` to ``path`` so that a reader sees the old file or the new one, never a part.

    The file and its folder are synchronized with the disk, so that this holds after a power failure too.

    Args:
        path: Path of the file; one writer at a time.
        content: Bytes, or text to encode as UTF-8 with lone surrogates as backslash escapes.

    Raises:
        OSError: The file cannot be written; the old file is untouched.
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
    """Write the folder's entries to the disk; a rename is durable only then."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot do it for folders; the file itself is written.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def find_newest_checkpoint(run_dir: Path) -> Path | None:
    """Return the checkpoint of the highest step; writing is atomic, so a ``step_N`` is complete."""
    found = [(int(match[1]), path) for path in run_dir.glob("checkpoints/*") if (match := _STEP.fullmatch(path.name))]
    return max(found)[1] if found else None
