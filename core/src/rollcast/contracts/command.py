"""Options and output functions shared by commands. A command is registered in ``rollcast.commands``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["ConfigDir", "Overrides", "Traceback", "build_console", "exit_code", "hide_library_bars", "print_lines"]

#: Key of ``--traceback`` in a context's ``meta``, which the contexts of a command line share.
TRACEBACK_KEY = "rollcast.traceback"

_exit_code: int | None = None


def exit_code() -> int | None:
    """Return the exit code with which this process's command ended; None before its end, or without a command.

    A function registered with ``atexit`` that has to end the process itself passes it to ``os._exit``.
    """
    return _exit_code


@contextmanager
def recorded_exit_code() -> Iterator[None]:
    """Record the exit code of the command that runs in the block, for :func:`exit_code`."""
    global _exit_code  # noqa: PLW0603  # a process has one exit code
    try:
        yield
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        # Python exits with 0 for None, and with 1 after it has printed any other object.
        _exit_code = code if isinstance(code, int) else int(code is not None)
        raise


def _remember(ctx: typer.Context, value: bool) -> bool:
    if value:
        ctx.meta[TRACEBACK_KEY] = True
    return value


def _complete(ctx: typer.Context, incomplete: str) -> list[str]:
    """Ask the root command, which knows the configuration; a plugin's command that runs by itself completes nothing."""
    complete = getattr(ctx.find_root().command, "complete_override", None)
    return [] if complete is None else list(complete(ctx.params.get("overrides") or (), incomplete))


Traceback = Annotated[
    bool, typer.Option("--traceback", callback=_remember, help="Show the traceback of an error, not only its message.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="OVERRIDES",
        help="group=option or section.key=value, such as recipe=quickstart.",
        autocompletion=_complete,
    ),
]
ConfigDir = Annotated[
    Path | None, typer.Option("--config-dir", metavar="DIR", help="A folder of your own config groups, searched first.")
]


def build_console(stderr: bool = False) -> Console:
    """Return a console that prints text verbatim, without markup, highlighting or wrapping."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=True)


def hide_library_bars() -> None:
    """Hide the progress bars of libraries, in workers too. Set ``TQDM_DISABLE=0`` to show them."""
    os.environ.setdefault("TQDM_DISABLE", "1")


def print_lines(*lines: str | Text, stderr: bool = False) -> None:
    """Print lines without wrapping or truncating them."""
    console = build_console(stderr)
    for line in lines:
        console.print(line)
