"""The command ``rollcast new``, which writes a package with one plugin and tests that pass.

The templates are complete packages around a plugin called ``my_plugin``; making a package from one replaces that name.
"""

from __future__ import annotations

import difflib
import importlib.util
import keyword
import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Annotated

import typer

from rollcast.contracts.command import Traceback, print_lines
from rollcast.errors import ConfigError

__all__ = ["app", "create_package", "describe_kinds"]

TEMPLATES = Path(__file__).parent / "templates"
_PLACE = re.compile(r"MyPlugin|my_plugin|MY_PLUGIN|my-plugin|rollcast~=[\d.]+")
#: Files that Python's tools and runs write into a package's folder.
_IGNORED = ("__pycache__/", "*.egg-info/", ".pytest_cache/", ".venv/", "build/", "dist/", "runs/")
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the plugin in configs and commands, such as my_reward.")
]
Into = Annotated[Path, typer.Option("--into", metavar="DIR", help="Folder in which the package's folder is made.")]


def describe_kinds() -> dict[str, str]:
    """Return the kinds of packages, sorted, each with what its template holds."""
    return {path.parent.name: _describe(path) for path in sorted(TEMPLATES.glob("*/pyproject.toml"))}


def _describe(pyproject: Path) -> str:
    described = str(tomllib.loads(pyproject.read_text("utf-8"))["project"]["description"])
    return (described.partition(": ")[2] or described).removesuffix(".")


def create_package(kind: str, name: str, into: Path) -> Path:
    """Write the package ``rollcast-NAME`` and return its folder.

    Args:
        kind: one of :func:`describe_kinds`; hyphens stand for underscores.
        name: name of the plugin in snake case.
        into: folder in which the package's folder is made.

    Raises:
        ConfigError: there is no such kind, the name cannot be a plugin's or is taken, or the folder exists.
    """
    template = TEMPLATES / _check_kind(kind)
    _check_name(name)
    _check_free(name, tomllib.loads((template / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"])
    folder = into / f"rollcast-{name.replace('_', '-')}"
    if folder.exists():
        raise ConfigError(f"{folder} exists already and is left as it is; choose another name or another --into DIR")
    texts = {
        path.relative_to(template): path.read_text("utf-8")
        for path in sorted(template.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    for path, text in texts.items():
        file = folder / _rename(str(path), name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_rename(text, name), "utf-8")
    (folder / ".gitignore").write_text("".join(f"{pattern}\n" for pattern in _IGNORED), "utf-8")
    return folder


def _rename(text: str, name: str) -> str:
    """Return a template's text with the plugin's name in place of ``my_plugin``."""
    forms = {
        "my_plugin": name,
        "MY_PLUGIN": name.upper(),
        "my-plugin": name.replace("_", "-"),
        "MyPlugin": "".join(word.capitalize() for word in name.split("_")),
    }
    # The range of the core that it is written with.
    return _PLACE.sub(lambda match: forms.get(match[0]) or f"rollcast~={version('rollcast')}", text)


def _check_kind(kind: str) -> str:
    kinds, asked = describe_kinds(), kind.replace("-", "_")
    if asked in kinds:
        return asked
    near = difflib.get_close_matches(asked, kinds, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"there is no template for a plugin of the kind {kind!r}. {hint}There are: {', '.join(kinds)}")


def _check_name(name: str) -> None:
    suggested = "_".join(re.findall(r"[a-z0-9]+", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower()))
    suggested = suggested.removeprefix("rollcast_").lstrip("0123456789_")
    if not _NAME.fullmatch(name) or keyword.iskeyword(name) or keyword.issoftkeyword(name) or suggested != name:
        usable = _NAME.fullmatch(suggested) and not keyword.iskeyword(suggested) and suggested != name
        hint = f"; try {suggested}" if usable else ""
        raise ConfigError(
            f"a plugin cannot be named {name!r}: a name is lower-case letters, digits and single underscores, begins "
            f"with a letter, is no word of Python's and has no prefix rollcast_{hint}"
        )


def _check_free(name: str, groups: Iterable[str]) -> None:
    if importlib.util.find_spec(f"rollcast_{name}") is not None:
        raise ConfigError(f"the package rollcast_{name} is installed already; choose another name than {name!r}")
    for group in groups:
        for entry in entry_points(group=group, name=name):
            owner = entry.dist.name if entry.dist else "another distribution"
            raise ConfigError(f"{owner} has a plugin {name!r} in {group} already; choose another name")


def _report(folder: Path) -> None:
    print_lines(
        f"wrote {folder}",
        *(f"  {path.relative_to(folder)}" for path in sorted(folder.rglob("*")) if path.is_file()),
        "Next:",
        f"  pip install -e {folder}",
        f"  pytest {folder}/tests",
        "  rollcast plugins --check",
        f"{folder / 'README.md'} says how a run uses it.",
    )


def _print_kinds(value: bool) -> None:
    if value:
        kinds = describe_kinds()
        width = max(map(len, kinds))
        print_lines(*(f"{kind:<{width}}  {what}" for kind, what in kinds.items()))
        raise typer.Exit


@app.callback(no_args_is_help=True)
def new(
    _list: Annotated[
        bool, typer.Option("--list", callback=_print_kinds, is_eager=True, help="List the kinds of plugins and exit.")
    ] = False,
    _traceback: Traceback = False,
) -> None:
    """Write a package with a plugin of your own and tests that pass."""


@app.command()
def plugin(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="Such as reward; 'rollcast new --list' lists them.")],
    name: Name,
    into: Into = Path(),
    _traceback: Traceback = False,
) -> None:
    """Write a package with a plugin of a kind."""
    _report(create_package(kind, name, into))


@app.command()
def environment(name: Name, into: Into = Path(), _traceback: Traceback = False) -> None:
    """Write a package with an environment."""
    _report(create_package("environment", name, into))


@app.command()
def recipe(name: Name, into: Into = Path(), _traceback: Traceback = False) -> None:
    """Write a package with a recipe and the data that it trains on."""
    _report(create_package("recipe", name, into))
