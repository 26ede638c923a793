"""``rollcast config``: every key of a configuration, its value and where it came from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollcast.cli.options import ConfigDir, Overrides, Traceback
from rollcast.cli.output import print_lines

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["config"]

_WIDEST_VALUE = 40


def config(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON object: key to value and origin, and the chosen options.")
    ] = False,
    _traceback: Traceback = False,
) -> None:
    """Show the resolved configuration, and where each value came from.

    Takes the arguments of 'rollcast train'. What still has to be set is shown as ???.
    """
    from omegaconf import OmegaConf

    from rollcast.config import compose
    from rollcast.config.sections import origin_of
    from rollcast.contracts.config import flatten

    composed = compose(overrides or (), config_dir, allow_missing=True)
    values = flatten(OmegaConf.to_container(composed.config, throw_on_missing=False))
    origins = {key: origin_of(key, composed.origins) for key in values}
    if as_json:
        keys = {key: {"value": value, "origin": origins[key]} for key, value in values.items()}
        typer.echo(json.dumps({"choices": composed.choices, "keys": keys}, indent=2))
    else:
        print_lines(*_render(values, origins))


def _render(values: dict[str, Any], origins: dict[str, str]) -> Iterator[Text]:
    from rich.text import Text

    shown = {key: show_value(value) for key, value in values.items()}
    keys = max(len(key) for key in shown)
    width = max((len(text) for text in shown.values() if len(text) <= _WIDEST_VALUE), default=0)
    for key, text in shown.items():
        note = f"# {origins[key]}" + (" (must be set)" if values[key] == "???" else "")
        style = "yellow" if values[key] == "???" else "cyan"
        yield Text.assemble(f"{key:<{keys}} = ", (f"{text:<{width}}", style), "  ", (note, "dim"))


def show_value(value: Any) -> str:
    """A value as it can be written in YAML: a string bare where it reads as that string."""
    import yaml

    if isinstance(value, str):
        try:
            bare = yaml.safe_load(value) == value
        except yaml.YAMLError:
            bare = False
        return value if bare else json.dumps(value)
    return json.dumps(value)
