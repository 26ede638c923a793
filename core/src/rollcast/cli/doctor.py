"""``rollcast doctor``: what is wrong with the machine, the installation, or a run's needs of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollcast.contracts.command import ConfigDir, Overrides, Traceback, print_lines, show_progress

if TYPE_CHECKING:
    from rich.text import Text

    from rollcast.cli.checkup import Examined
    from rollcast.config import Composed
    from rollcast.contracts.health import HealthSetup

__all__ = ["doctor"]

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON object: the findings, and how many there are of each state.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="NAME", help="Only this check, or those of this distribution; may be repeated."),
    ] = None,
    _traceback: Traceback = False,
) -> None:
    """Find faults of the machine and the installation, and say how to fix each.

    With the arguments of 'rollcast train', or single keys such as model.path=DIR, the run's directory, model and
    rollout are looked at too. Exit code 0: no problem, though there may be warnings; 1: at least one problem;
    2: the arguments are wrong.
    """
    from rollcast.cli.checkup import examine
    from rollcast.contracts.health import health_checks
    from rollcast.errors import PluginNotFoundError
    from rollcast.plugins.discovery import find_plugins

    known = {name for plugin in find_plugins(health_checks.group) for name in (plugin.name, plugin.distribution)}
    if unknown := sorted(set(only or ()) - known):
        raise PluginNotFoundError(
            f"--only {unknown[0]}: there is no such check or distribution; there are: {', '.join(sorted(known))}"
        )
    with show_progress("examining machine and installation"):
        rows = examine(_build_setup(overrides or (), config_dir), only or ())
    counts = {state: sum(row.finding.state == state for row in rows) for state in _STYLES}
    if as_json:
        typer.echo(json.dumps({"counts": counts, "findings": [row.as_dict() for row in rows]}, indent=2))
    else:
        print_lines(*_render(rows), _summary(counts))
    if counts["problem"]:
        raise typer.Exit(1)


def _build_setup(overrides: Sequence[str], config_dir: Path | None) -> HealthSetup:
    from rollcast.contracts.health import HealthSetup

    if not overrides:
        return HealthSetup()
    # The checks run in other processes; what JSON has no type for, such as a date, is text there.
    return HealthSetup(json.loads(json.dumps(_compose(overrides, config_dir).plain(), default=str)))


def _compose(overrides: Sequence[str], config_dir: Path | None) -> Composed:
    """Compose a run; single keys without a recipe are those of the first trainer that has all of them.

    Raises:
        RollcastError: no configuration has the keys.
    """
    from rollcast.config import compose
    from rollcast.config.sources import find_options
    from rollcast.errors import ConfigError

    try:
        return compose(overrides, config_dir, allow_missing=True)
    except ConfigError:
        if any(override.partition("=")[0] in ("recipe", "trainer") for override in overrides):
            raise
        for trainer in find_options("trainer", config_dir):
            try:
                return compose([f"trainer={trainer}", *overrides], config_dir, allow_missing=True)
            except ConfigError:
                continue
        raise


def _render(rows: Sequence[Examined]) -> Iterator[Text]:
    from rich.text import Text

    ordered = _by_subject(rows)
    names = max((len(row.finding.name) for row in ordered), default=0)
    for subject, group in groupby(ordered, key=lambda row: row.subject):
        yield Text(subject, style="bold")
        for row in group:
            finding = row.finding
            state = (f"{finding.state:<7}", _STYLES[finding.state])
            yield Text.assemble("  ", state, f"  {finding.name:<{names}}  {finding.message}")
            if finding.fix:
                yield Text.assemble(f"  {'':<7}  {'':<{names}}  ", ("fix: ", "cyan"), finding.fix)


def _by_subject(rows: Sequence[Examined]) -> list[Examined]:
    """Return the rows with those of a subject together, in the order in which the subjects come first."""
    order = {subject: place for place, subject in reversed(list(enumerate(row.subject for row in rows)))}
    return sorted(rows, key=lambda row: order[row.subject])


def _summary(counts: dict[str, int]) -> str:
    def number(state: str) -> str:
        return f"{counts[state]} {state}{'s' if counts[state] != 1 else ''}"

    return f"{number('problem')}, {number('warning')}, {counts['ok']} ok"
