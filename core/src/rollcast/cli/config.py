"""``rollcast config``, which shows every key of a configuration with its value, origin and documentation."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollcast.contracts.command import ConfigDir, Overrides, Traceback, print_lines

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["config"]

_WIDEST_VALUE = 40


def config(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON: value, origin and documentation of each key, and the chosen options."),
    ] = False,
    docs: Annotated[bool, typer.Option("--docs", help="Show the documentation of each key too.")] = False,
    _traceback: Traceback = False,
) -> None:
    """Show the resolved configuration and the origin of each value.

    Takes the arguments of 'rollcast train'. Mandatory keys that are not set are shown as ???. Sections that only repeat
    another section, such as critic.engine, are omitted; --json includes them.
    """
    from rollcast.config import compose
    from rollcast.config.sections import origin_of
    from rollcast.contracts.config import flatten

    composed = compose(overrides or (), config_dir, allow_missing=True)
    values = flatten(composed.plain())
    origins = {key: origin_of(key, composed.origins) for key in values}
    meanings = composed.sections.docs() if docs or as_json else {}
    if as_json:
        keys = {
            key: {"value": value, "origin": origins[key], "doc": meanings.get(key)} for key, value in values.items()
        }
        typer.echo(json.dumps({"choices": composed.choices, "keys": keys}, indent=2))
    else:
        print_lines(*_render(values, origins, meanings))


def _render(values: Mapping[str, Any], origins: Mapping[str, str], docs: Mapping[str, str]) -> Iterator[Text]:
    from rich.text import Text

    shown = {key: show_value(value) for key, value in values.items() if not origins[key].startswith("as ")}
    keys = max(len(key) for key in shown)
    width = max((len(text) for text in shown.values() if len(text) <= _WIDEST_VALUE), default=0)
    for key, text in shown.items():
        note = f"# {origins[key]}" + (" (must be set)" if values[key] == "???" else "")
        style = "yellow" if values[key] == "???" else "cyan"
        yield Text.assemble(f"{key:<{keys}} = ", (f"{text:<{width}}", style), "  ", (note, "dim"))
        for line in textwrap.wrap(docs.get(key, ""), 100):
            yield Text(f"    {line}", style="italic")


def show_value(value: Any) -> str:
    """Format a value for YAML; a string is quoted only if necessary."""
    import yaml

    if isinstance(value, str):
        try:
            bare = yaml.safe_load(value) == value
        except yaml.YAMLError:
            bare = False
        return value if bare else json.dumps(value)
    return json.dumps(value)
