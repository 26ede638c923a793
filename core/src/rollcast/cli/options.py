"""Options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["ConfigDir", "Overrides", "Traceback", "wants_traceback"]

_KEY = "rollcast.traceback"


def _remember(ctx: typer.Context, value: bool) -> bool:
    if value:
        ctx.meta[_KEY] = True
    return value


def wants_traceback(ctx: typer.Context) -> bool:
    """Whether ``--traceback`` was given, before the command or after it."""
    return bool(ctx.meta.get(_KEY, False))


Traceback = Annotated[
    bool, typer.Option("--traceback", callback=_remember, help="Show the traceback of an error, not only its message.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="OVERRIDES", help="group=option or section.key=value, such as recipe=quickstart."),
]
ConfigDir = Annotated[
    Path | None, typer.Option("--config-dir", metavar="DIR", help="A folder of your own config groups, searched first.")
]
