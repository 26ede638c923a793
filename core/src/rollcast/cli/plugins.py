"""``rollcast plugins``: every part, who provides it, and what is wrong with it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from rollcast.cli.options import Traceback
from rollcast.cli.output import print_lines

if TYPE_CHECKING:
    from rich.text import Text

    from rollcast.plugins.reporting import PartReport

__all__ = ["plugins"]

_SOUND = ("ok", "in-process")


def plugins(
    group: Annotated[str, typer.Argument(metavar="GROUP", help="Only this group, such as engines.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list, one object a part.")] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Import every part, in a process apart."),
    ] = False,
    _traceback: Traceback = False,
) -> None:
    """List the installed parts, who provides them, and what is broken.

    Nothing is imported without --check: sources are read, which finds most of what can be wrong.
    The exit code is 0 whatever they are like; with --check it is 1 if a part is not sound.
    """
    from rollcast.config.parts import registry_modules
    from rollcast.plugins.reporting import report

    groups = [_find_group(group)] if group else None
    modules = (*registry_modules(), "rollcast.cli.extensions") if check else None
    rows = report(check, groups, modules)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print_lines(*_render(rows))
    if check and any(row.state not in _SOUND for row in rows):
        raise typer.Exit(1)


def _find_group(asked: str) -> str:
    from rollcast.errors import PluginNotFoundError
    from rollcast.plugins.groups import GROUPS
    from rollcast.plugins.metadata import find_groups

    known = sorted({*GROUPS, *(name for name in find_groups() if name.startswith("rollcast."))})
    for name in (asked, f"rollcast.{asked}"):
        if name in known:
            return name
    short = [name.removeprefix("rollcast.") for name in known]
    near = difflib.get_close_matches(asked.removeprefix("rollcast."), short, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise PluginNotFoundError(f"there is no group {asked!r}; {hint}There are: {', '.join(short)}")


def _render(rows: Sequence[PartReport]) -> Iterator[Text | str]:
    from rich.text import Text

    from rollcast.plugins.groups import GROUPS

    if not rows:
        yield "nothing is installed"
    names = max((len(row.name) for row in rows), default=0)
    owners = max((len(_owner(row)) for row in rows), default=0)
    for group, parts in groupby(rows, key=lambda row: row.group):
        described = f"  {GROUPS[group].description}" if group in GROUPS else ""
        yield Text.assemble((group, "bold"), (described, "dim"))
        for row in parts:
            state = (row.state, "green" if row.state in _SOUND else "bold red")
            yield Text.assemble(f"  {row.name:<{names}}  {_owner(row):<{owners}}  ", state)
            for line in row.cause.splitlines():
                yield Text(f"  {'':<{names}}  {line}", style="red")


def _owner(row: PartReport) -> str:
    return f"{row.distribution} {row.version}".strip() or row.value
