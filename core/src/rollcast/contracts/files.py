"""Files that are there whole or not at all, and the checkpoints of a run directory."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["find_newest_checkpoint", "replace_file"]

_STEP = re.compile(r"step_(\d+)")


def replace_file(path: Path, content: str | bytes) -> None:
    """Write ``content`` to ``path`` so that a reader sees the old file or the new one, never a part.

    Args:
        path: of the file; one writer at a time.
        content: bytes, or text for UTF-8, lone surrogates as backslash escapes.

    Raises:
        OSError: it cannot be written; what was there before still is.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace"))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def find_newest_checkpoint(run_dir: Path) -> Path | None:
    """Return the checkpoint of the highest step; writing is atomic, so a ``step_N`` is complete."""
    found = [(int(match[1]), path) for path in run_dir.glob("checkpoints/*") if (match := _STEP.fullmatch(path.name))]
    return max(found)[1] if found else None
