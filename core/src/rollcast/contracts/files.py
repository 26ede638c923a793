"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["replace_file"]


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
