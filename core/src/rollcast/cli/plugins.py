"""``rollcast plugins``, which lists every plugin with its distribution and its problems."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from rollcast.contracts.command import Traceback, print_lines, show_progress

if TYPE_CHECKING:
    from rich.text import Text

    from rollcast.plugins.health import PluginReport

__all__ = ["check_all", "plugins"]

_SOUND = ("ok", "in-process")


def plugins(
    group: Annotated[str, typer.Argument(metavar="GROUP", help="Show only this group, such as engines.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list, one object per plugin.")] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Import every plugin in a separate process."),
    ] = False,
    _traceback: Traceback = False,
) -> None:
    """List the installed plugins, their distributions and their problems.

    Without --check, nothing is imported: the metadata shows conflicts, incompatible versions and missing
    distributions. The exit code is 0; with --check it is 1 if a plugin is broken.
    """
    from rollcast.plugins.health import report

    groups = [_find_group(group)] if group else None
    if check:
        with show_progress("importing plugins"):
            rows = check_all(groups)
    else:
        rows = report(False, groups)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print_lines(*_render(rows))
    if check and any(row.state not in _SOUND for row in rows):
        raise typer.Exit(1)


def check_all(groups: Sequence[str] | None = None) -> list[PluginReport]:
    """Import every plugin of some groups, or of all, in a process of its own."""
    from rollcast.config.assembly import registry_modules
    from rollcast.plugins.discovery import find_plugins
    from rollcast.plugins.health import report

    # Packages of configuration declare the registries of groups whose contract a plugin holds.
    packages = [plugin.module for plugin in find_plugins("rollcast.configs") if plugin.module]
    return report(True, groups, (*registry_modules(), "rollcast.cli.app", *packages))


def _find_group(asked: str) -> str:
    from rollcast.errors import PluginNotFoundError
    from rollcast.plugins.discovery import describe_groups, find_groups

    known = sorted({*describe_groups(), *(name for name in find_groups() if name.startswith("rollcast."))})
    for name in (asked, f"rollcast.{asked}"):
        if name in known:
            return name
    short = [name.removeprefix("rollcast.") for name in known]
    near = difflib.get_close_matches(asked.removeprefix("rollcast."), short, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise PluginNotFoundError(f"there is no group {asked!r}; {hint}There are: {', '.join(short)}")


def _render(rows: Sequence[PluginReport]) -> Iterator[Text | str]:
    from rich.text import Text

    from rollcast.plugins.discovery import describe_groups

    described = describe_groups()
    if not rows:
        yield "nothing is installed"
    names = max((len(row.name) for row in rows), default=0)
    owners = max((len(_owner(row)) for row in rows), default=0)
    for group, parts in groupby(rows, key=lambda row: row.group):
        yield Text.assemble((group, "bold"), (f"  {described.get(group, '')}".rstrip(), "dim"))
        for row in parts:
            state = (row.state, "green" if row.state in _SOUND else "bold red")
            yield Text.assemble(f"  {row.name:<{names}}  {_owner(row):<{owners}}  ", state)
            for line in row.cause.splitlines():
                yield Text(f"  {'':<{names}}  {line}", style="red")


def _owner(row: PluginReport) -> str:
    return f"{row.distribution} {row.version}".strip() or row.value
