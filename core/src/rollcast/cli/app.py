"""The command ``rollcast``: built-in commands, commands of plugins, and the entry point.

A plugin in ``rollcast.commands`` is imported when its command is called; ``--help`` reads the first line of its help
from the source. A plugin cannot replace a built-in command, and a broken plugin affects only its own command.
"""

from __future__ import annotations

import ast
import faulthandler
import functools
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as find_version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from rollcast.cli.config import config
from rollcast.cli.doctor import doctor
from rollcast.cli.explain import explain
from rollcast.cli.plugins import plugins
from rollcast.cli.terminal import readable_errors, set_up_logging, stoppable
from rollcast.cli.train import train
from rollcast.contracts.command import TRACEBACK_KEY, Traceback, print_lines, recorded_exit_code
from rollcast.contracts.storage import explain_local, is_url
from rollcast.errors import ConfigError, PluginError
from rollcast.plugins import Registry
from rollcast.plugins.discovery import CORE_DISTRIBUTION, PluginInfo, find_groups, find_plugins, find_source

__all__ = ["build_app", "commands", "main", "version"]


def _is_command(obj: object) -> str | None:
    if isinstance(obj, typer.Typer) or (not isinstance(obj, type) and callable(getattr(obj, "main", None))):
        return None
    return f"is a {type(obj).__name__}, neither a typer.Typer nor a click command"


commands: Registry[Any] = Registry(
    "rollcast.commands", _is_command, "rollcast NAME", description="sub-commands of the command line"
)


class _Group(TyperGroup):
    """The group of built-in and plugin commands, which shows the errors of all commands in the same way."""

    def list_commands(self, ctx: Any) -> list[str]:
        built_in = super().list_commands(ctx)
        return [*built_in, *(name for name in _find_commands() if name not in built_in)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            return command
        plugin = _find_commands().get(cmd_name)
        return None if plugin is None else _build_forwarder(plugin)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if ctx.resilient_parsing and isinstance(command, _Forwarder):
            # A shell completes the arguments of this one command, and needs its options.
            with suppress(PluginError):
                loaded = commands.get(str(name))
                command = typer.main.get_command(loaded) if isinstance(loaded, typer.Typer) else loaded
        return name, command, rest

    def complete_override(self, args: Sequence[str], incomplete: str) -> list[str]:
        """Return completions of an override; see :func:`rollcast.cli.completion.complete_override`."""
        from rollcast.cli.completion import complete_override

        return complete_override(args, incomplete)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.epilog = _epilog(super().list_commands(ctx))
        super().format_help(ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        with stoppable(), readable_errors(lambda: bool(ctx.meta.get(TRACEBACK_KEY))):
            # Set up here, because --help and usage errors need neither logging nor plugin metadata.
            set_up_logging()
            return super().invoke(ctx)


def _find_commands() -> dict[str, PluginInfo]:
    return {plugin.name: plugin for plugin in find_plugins(commands.group)}


def _epilog(built_in: list[str]) -> str | None:
    notes = [
        f"The command {name!r} of {plugin.owner} is left out: there is a built-in one."
        for name, plugin in _find_commands().items()
        if name in built_in
    ]
    return " ".join(notes) or None


class _Forwarder(TyperCommand):
    """A command that passes all arguments, including ``--help``, to a plugin's command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []


def _build_forwarder(plugin: PluginInfo) -> Any:
    """Build a command with the plugin's name that imports the plugin when it is called."""

    def forward(ctx: typer.Context) -> None:
        loaded = commands.get(plugin.name, requested_by=f"rollcast {plugin.name}")
        command = typer.main.get_command(loaded) if isinstance(loaded, typer.Typer) else loaded
        _refuse_urls(command, ctx.args)
        # The parent context shares its ``meta``, and therefore --traceback, with the command's context.
        command.main(args=list(ctx.args), prog_name=plugin.name, parent=ctx.parent)

    app = typer.Typer()
    line = _read_help(plugin) or f"A command of {plugin.owner}."
    app.command(plugin.name, cls=_Forwarder, add_help_option=False, help=line)(forward)
    return typer.main.get_command(app)


def _refuse_urls(command: Any, arguments: Sequence[str]) -> None:
    """Make a command refuse a URL for a parameter that it takes as a path.

    A path turns ``s3://bucket/x`` into ``s3:/bucket/x``, a folder ``s3:`` on this machine. A command that can read or
    write a URL takes it as text.

    Args:
        command: command or group; the functions that it calls are replaced.
        arguments: arguments as they were written.
    """
    texts = [text for argument in arguments for text in (argument, argument.partition("=")[2])]
    urls = {Path(text): text for text in texts if is_url(text)}
    if not urls:
        return
    for inner in getattr(command, "commands", {}).values():
        _refuse_urls(inner, arguments)
    function = getattr(command, "callback", None)
    if function is None:
        return

    @functools.wraps(function)
    def checked(*positional: Any, **values: Any) -> Any:
        for parameter in command.params:
            value = values.get(parameter.name)
            for path in value if isinstance(value, list | tuple) else [value]:
                if isinstance(path, Path) and path in urls:
                    name = parameter.opts[0] if parameter.param_type_name == "option" else parameter.metavar
                    raise ConfigError(explain_local(name or parameter.name, urls[path]))
        return function(*positional, **values)

    command.callback = checked


def _read_help(plugin: PluginInfo) -> str:
    """Return the first help line of a plugin's command; empty if it cannot be found in the source.

    The source is parsed but not executed, because ``--help`` shows all commands and importing one may import torch.
    """
    source, attribute = find_source(plugin), plugin.value.partition(":")[2].strip()
    try:
        tree = ast.parse(source.read_text(encoding="utf-8")) if source else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):
        return ""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    # As in Typer, the help of an application with several commands is the callback's.
    own = [function for function in functions if _is_decorated(function, f"{attribute}.callback")] or [
        function
        for function in functions
        if function.name == attribute or _is_decorated(function, f"{attribute}.command")
    ]
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
            names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
            texts = [keyword.value for keyword in statement.value.keywords if keyword.arg == "help"]
            if attribute in names and texts and isinstance(texts[0], ast.Constant):
                return str(texts[0].value).partition("\n")[0]
    return (ast.get_docstring(own[0]) or "").partition("\n")[0] if len(own) == 1 else ""


def _is_decorated(function: ast.FunctionDef, by: str) -> bool:
    """Return True if ``@by`` or ``@by(...)`` decorates the function, such as ``app.command``."""
    decorators = (
        decorator.func if isinstance(decorator, ast.Call) else decorator for decorator in function.decorator_list
    )
    return any(ast.unparse(decorator) == by for decorator in decorators)


def version(_traceback: Traceback = False) -> None:
    """Show the versions of the core, the installed plugins, Python and the main libraries."""
    groups = [group for group in find_groups() if group.startswith("rollcast.")]
    versions = {plugin.distribution: plugin.version for group in groups for plugin in find_plugins(group)}
    core = versions.pop(CORE_DISTRIBUTION, None) or _installed(CORE_DISTRIBUTION)
    rows = {CORE_DISTRIBUTION: core, **dict(sorted(versions.items())), "python": platform.python_version()}
    rows |= {name: _installed(name) for name in ("torch", "ray")}
    width = max(map(len, rows))
    print_lines(*(f"{name:<{width}}  {number}" for name, number in rows.items()))


def _installed(distribution: str) -> str:
    try:
        return find_version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _show_version(value: bool) -> None:
    if value:
        print_lines(f"rollcast {_installed(CORE_DISTRIBUTION)}")
        raise typer.Exit


def _root(
    _traceback: Traceback = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the core's version and exit.")
    ] = False,
) -> None:
    """Plugin-based reinforcement-learning post-training of language models."""


def build_app() -> typer.Typer:
    """Build the application without importing plugins."""
    app = typer.Typer(
        name="rollcast",
        cls=_Group,
        no_args_is_help=True,
        # Only bugs show tracebacks, which should be complete and unformatted.
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(_root)
    for command in (train, config, explain, doctor, plugins, version):
        app.command()(command)
    return app


def main() -> None:
    """Run the command line; never returns."""
    # A plugin whose native code crashes ends the process; the stack names the file that was running.
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)
    with recorded_exit_code():
        build_app()(prog_name="rollcast")
