"""Commands that plugins add.

A part in ``rollcast.commands`` is listed by name and imported when it is called. Listeners to the
hook ``on_cli`` have to be imported to be asked, so they are asked only for a command that nobody
else provides; ``--help`` says who they are. What a plugin adds never takes the place of a built-in
command, and a broken plugin is met only by whoever calls its command.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand

from rollcast.plugins import Registry
from rollcast.plugins.discovery import PluginInfo, find_plugins

__all__ = ["build_forwarder", "commands", "find_command_parts", "find_hook_command", "find_listeners"]

logger = logging.getLogger(__name__)


def _is_command(obj: object) -> str | None:
    if isinstance(obj, typer.Typer) or (not isinstance(obj, type) and callable(getattr(obj, "main", None))):
        return None
    return f"is a {type(obj).__name__}, neither a typer.Typer nor a click command"


commands: Registry[Any] = Registry(
    "rollcast.commands", _is_command, "rollcast NAME", description="sub-commands of the command line"
)


def find_command_parts() -> dict[str, PluginInfo]:
    """The installed commands by name; nothing is imported."""
    return {part.name: part for part in find_plugins(commands.group)}


def find_listeners() -> list[str]:
    """The distributions whose listeners may add commands; nothing is imported."""
    return sorted({part.owner for part in find_plugins("rollcast.hooks")})


class _Forwarder(TyperCommand):
    """Leaves every argument to the plugin's command, ``--help`` included."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []


def build_forwarder(part: PluginInfo) -> Any:
    """A command of the part's name that imports the part when it is called."""

    def forward(ctx: typer.Context) -> None:
        command = commands.get(part.name, requested_by=f"rollcast {part.name}")
        run: Callable[..., Any] = command if isinstance(command, typer.Typer) else command.main
        run(args=list(ctx.args), prog_name=f"rollcast {part.name}")

    app = typer.Typer()
    app.command(part.name, cls=_Forwarder, add_help_option=False, help=f"A command of {part.owner}.")(forward)
    return _group(app).commands[part.name]


def find_hook_command(name: str) -> Any:
    """The command of that name that a listener to ``on_cli`` adds, or None.

    A listener that fails is logged: the command may well be someone else's.
    """
    if not find_listeners():
        return None
    from rollcast.contracts.hooks import build_hook_manager

    app = typer.Typer(pretty_exceptions_enable=False)
    try:
        build_hook_manager().hook.on_cli(app=app)
    except Exception as error:  # noqa: BLE001  # whatever a stranger's listener raises
        logger.warning("a listener to on_cli failed: %s: %s", type(error).__name__, error)
    return _group(app).commands.get(name)


def _group(app: typer.Typer) -> Any:
    return typer.main.get_group(app)
