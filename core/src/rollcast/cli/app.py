"""The command ``rollcast``: the built-in commands, those of plugins, and the entry point.

A plugin in ``rollcast.commands`` is listed by name and imported when it is called. Listeners to the hook ``on_cli``
have to be imported to be asked, so they are asked only for a command that nobody else provides; ``--help`` says who
they are. A plugin's command never replaces a built-in one, and a broken plugin is met only by who calls its command.
"""

from __future__ import annotations

import logging
import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as find_version
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from rollcast.cli.config import config
from rollcast.cli.plugins import plugins
from rollcast.cli.terminal import readable_errors, set_up_logging, stoppable
from rollcast.cli.train import train
from rollcast.contracts.command import TRACEBACK_KEY, Traceback, print_lines
from rollcast.plugins import Registry
from rollcast.plugins.discovery import CORE_DISTRIBUTION, PluginInfo, find_groups, find_plugins

__all__ = ["build_app", "commands", "main", "version"]

logger = logging.getLogger(__name__)


def _is_command(obj: object) -> str | None:
    if isinstance(obj, typer.Typer) or (not isinstance(obj, type) and callable(getattr(obj, "main", None))):
        return None
    return f"is a {type(obj).__name__}, neither a typer.Typer nor a click command"


commands: Registry[Any] = Registry(
    "rollcast.commands", _is_command, "rollcast NAME", description="sub-commands of the command line"
)


class _Group(TyperGroup):
    """The built-in commands and those of plugins; errors of all of them are shown the same way."""

    def list_commands(self, ctx: Any) -> list[str]:
        built_in = super().list_commands(ctx)
        return [*built_in, *(name for name in _find_commands() if name not in built_in)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is not None:
            return found
        plugin = _find_commands().get(cmd_name)
        return _find_hook_command(cmd_name) if plugin is None else _build_forwarder(plugin)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.epilog = _epilog(super().list_commands(ctx))
        super().format_help(ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        with stoppable(), readable_errors(lambda: bool(ctx.meta.get(TRACEBACK_KEY))):
            # Not earlier: --help and mistakes in the command line need no logging, and reading what is installed.
            set_up_logging()
            return super().invoke(ctx)


def _find_commands() -> dict[str, PluginInfo]:
    return {plugin.name: plugin for plugin in find_plugins(commands.group)}


def _find_listeners() -> list[str]:
    return sorted({plugin.owner for plugin in find_plugins("rollcast.hooks")})


def _epilog(built_in: list[str]) -> str | None:
    notes = [
        f"The command {name!r} of {plugin.owner} is left out: there is a built-in one."
        for name, plugin in _find_commands().items()
        if name in built_in
    ]
    listeners = _find_listeners()
    if listeners:
        notes.append(f"Further commands may come from {', '.join(listeners)}, which are imported when they are called.")
    return " ".join(notes) or None


class _Forwarder(TyperCommand):
    """Leaves every argument to the plugin's command, ``--help`` included."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []


def _build_forwarder(plugin: PluginInfo) -> Any:
    """A command of the plugin's name that imports the plugin when it is called."""

    def forward(ctx: typer.Context) -> None:
        command = commands.get(plugin.name, requested_by=f"rollcast {plugin.name}")
        run = command if isinstance(command, typer.Typer) else command.main
        # With its parent, the command's context shares ``meta``, and so --traceback.
        run(args=list(ctx.args), prog_name=plugin.name, parent=ctx.parent)

    app = typer.Typer()
    app.command(plugin.name, cls=_Forwarder, add_help_option=False, help=f"A command of {plugin.owner}.")(forward)
    return _commands_of(app)[plugin.name]


def _find_hook_command(name: str) -> Any:
    """The command of that name that a listener to ``on_cli`` adds, or None.

    A listener that fails is logged: the command may well be another plugin's.
    """
    if not _find_listeners():
        return None
    from rollcast.contracts.hooks import build_hook_manager

    app = typer.Typer(pretty_exceptions_enable=False)
    try:
        build_hook_manager().hook.on_cli(app=app)
    except Exception as error:  # noqa: BLE001  # whatever a stranger's listener raises
        logger.warning("a listener to on_cli failed: %s: %s", type(error).__name__, error)
    return _commands_of(app).get(name)


def _commands_of(app: typer.Typer) -> dict[str, Any]:
    return dict(typer.main.get_group(app).commands)


def version(_traceback: Traceback = False) -> None:
    """Show the versions of the core, the installed plugins, and what they run on."""
    groups = [group for group in find_groups() if group.startswith("rollcast.")]
    found = {plugin.distribution: plugin.version for group in groups for plugin in find_plugins(group)}
    core = found.pop(CORE_DISTRIBUTION, None) or _installed(CORE_DISTRIBUTION)
    rows = {CORE_DISTRIBUTION: core, **dict(sorted(found.items())), "python": platform.python_version()}
    rows |= {name: _installed(name) for name in ("torch", "ray")}
    width = max(map(len, rows))
    print_lines(*(f"{name:<{width}}  {number}" for name, number in rows.items()))


def _installed(distribution: str) -> str:
    try:
        return find_version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _root(_traceback: Traceback = False) -> None:
    """Reinforcement-learning post-training of language models, assembled from installable plugins."""


def build_app() -> typer.Typer:
    """Build the application; no plugin is imported."""
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
    for command in (train, config, plugins, version):
        app.command()(command)
    return app


def main() -> None:
    """Run the command line; never returns."""
    build_app()(prog_name="rollcast")
