"""Where commands write: consoles that print text as it is, without markup, colour by content or wrapping."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["build_console", "hide_library_bars", "print_lines"]


def build_console(stderr: bool = False) -> Console:
    """A console; rich is imported here, because most of ``--help`` does not need it."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=True)


def hide_library_bars() -> None:
    """Keep the progress bars of libraries, for loading a model say, from tearing our own output apart.

    Workers inherit it; a person who sets ``TQDM_DISABLE=0`` sees the bars.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")


def print_lines(*lines: str | Text, stderr: bool = False) -> None:
    """Print lines, none of which is wrapped or cut."""
    console = build_console(stderr)
    for line in lines:
        console.print(line)
