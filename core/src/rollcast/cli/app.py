"""The command ``rollcast``: its group of commands, and the entry point."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from rollcast.cli.config import config
from rollcast.cli.export import export
from rollcast.cli.extensions import build_forwarder, find_command_parts, find_hook_command, find_listeners
from rollcast.cli.failures import readable_errors
from rollcast.cli.options import Traceback, wants_traceback
from rollcast.cli.plugins import plugins
from rollcast.cli.preprocess import preprocess
from rollcast.cli.signals import stoppable
from rollcast.cli.train import train
from rollcast.cli.version import version

__all__ = ["build_app", "main"]

_BUILT_IN = (train, preprocess, config, plugins, export, version)


class _Group(TyperGroup):
    """The built-in commands and those of plugins; errors of all of them are shown the same way."""

    def list_commands(self, ctx: Any) -> list[str]:
        built_in = super().list_commands(ctx)
        return [*built_in, *(name for name in find_command_parts() if name not in built_in)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is not None:
            return found
        part = find_command_parts().get(cmd_name)
        return find_hook_command(cmd_name) if part is None else build_forwarder(part)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.epilog = _epilog(super().list_commands(ctx))
        super().format_help(ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        with stoppable(), readable_errors(lambda: wants_traceback(ctx)):
            # Not earlier: --help and mistakes in the command line need no logging, and reading what is installed.
            from rollcast.cli.logs import set_up_logging

            set_up_logging()
            return super().invoke(ctx)


def _epilog(built_in: list[str]) -> str | None:
    notes = [
        f"The command {name!r} of {part.owner} is left out: there is a built-in one."
        for name, part in find_command_parts().items()
        if name in built_in
    ]
    listeners = find_listeners()
    if listeners:
        notes.append(f"Further commands may come from {', '.join(listeners)}, which are imported when they are called.")
    return " ".join(notes) or None


def _root(_traceback: Traceback = False) -> None:
    """Reinforcement-learning post-training of language models from installable parts."""


def build_app() -> typer.Typer:
    """The application; building it imports no plugin."""
    app = typer.Typer(
        name="rollcast",
        cls=_Group,
        add_completion=False,
        no_args_is_help=True,
        # Tracebacks are for bugs, and then whole and plain.
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(_root)
    for command in _BUILT_IN:
        app.command()(command)
    return app


def main() -> None:
    """Run the command line; never returns."""
    build_app()(prog_name="rollcast")
