"""``rollcast explain KEY``, which shows a key's documentation, valid values, default and current value."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollcast.cli.config import show_value
from rollcast.contracts.command import ConfigDir, Overrides, Traceback, print_lines

if TYPE_CHECKING:
    from rollcast.config.assembly import Composed

__all__ = ["explain"]


def explain(
    key: Annotated[str, typer.Argument(metavar="KEY", help="A key or a section, such as actor.optim.lr.")],
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each key.")] = False,
    _traceback: Traceback = False,
) -> None:
    """Show the documentation, valid values, default, declaring class and current value of a key.

    OVERRIDES are those of 'rollcast train'. They choose the plugins, which define the keys that exist.
    """
    from rollcast.config import compose
    from rollcast.config.sections import unknown_key
    from rollcast.errors import ConfigError

    composed = compose(overrides or (), config_dir, allow_missing=True)
    keys = describe_keys(composed, key)
    if not keys:
        raise ConfigError(unknown_key(key, composed.sections.known(), {key: "command line"}))
    if as_json:
        typer.echo(json.dumps(keys, indent=2))
    elif len(keys) == 1 and key in keys:
        ((name, about),) = keys.items()
        print_lines(name, *(f"  {label:<8} {text}" for label, text in _rows(about)))
    else:
        width = max(map(len, keys))
        print_lines(*(f"{name:<{width}}  {about['doc']}" for name, about in keys.items()))


def describe_keys(composed: Composed, key: str) -> dict[str, dict[str, Any]]:
    """Return the facts about a key, or about each key of a section; empty if neither exists."""
    from rollcast.config.sections import declarations, origin_of
    from rollcast.contracts.config import flatten

    values = flatten(composed.plain())
    declared = declarations(composed.sections)
    names = [name for name in declared if name == key or name.startswith(f"{key}.")]
    return {
        name: {**declared[name], "value": values.get(name), "origin": origin_of(name, composed.origins)}
        for name in names
    }


def _rows(about: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the labelled lines about a key."""
    same = about["origin"].startswith("default of ")
    return [
        ("means", about["doc"] or "(not documented)"),
        ("takes", about["takes"]),
        ("default", show_value(about["default"])),
        *_accelerator_rows(about),
        *([] if same else [("here", f"{show_value(about['value'])}  (from {about['origin']})")]),
        ("declared", f"in {about['declared']}"),
    ]


def _accelerator_rows(about: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the line about a default of its own on accelerators, if the key has one."""
    if "on_accelerator" not in about:
        return []
    return [("", f"{show_value(about['on_accelerator'])} on an accelerator: {about['reason']}")]
