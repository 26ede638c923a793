"""The command ``rollcast plan``: show the sizes and memory of a run before it starts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from rollcast.contracts.command import ConfigDir, Overrides, print_lines

if TYPE_CHECKING:
    from rollcast_automap.plan import Plan

__all__ = ["app", "plan"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def plan(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object: section to key to value, and notes.")
    ] = False,
    skip_data: Annotated[
        bool, typer.Option("--skip-data", help="Do not read the data files to count their rows.")
    ] = False,
    device_memory: Annotated[
        float | None,
        typer.Option(
            "--device-memory", min=1.0, metavar="GIB", help="Memory of each device in GiB; checks that the run fits."
        ),
    ] = None,
) -> None:
    """Show the batch algebra, length, roles and memory of a run, without starting it.

    Accepts the arguments of 'rollcast train' and rejects the same invalid ones.
    """
    from rollcast import compose
    from rollcast_automap.plan import plan_run
    from rollcast_trainer.api import check_run

    composed = compose(overrides or (), config_dir, needs_trainer=True)
    composed.load_plugins()
    settings = check_run(composed.config)
    device_bytes = None if device_memory is None else int(device_memory * 2**30)
    run_plan = plan_run(settings, read_data=not skip_data, device_bytes=device_bytes)
    run_plan.add_device_defaults(composed.plain(), composed.by_device())
    if as_json:
        typer.echo(json.dumps(run_plan.as_dict(), indent=2))
    else:
        print_lines(*_render(run_plan))


def _render(run_plan: Plan) -> list[str]:
    lines: list[str] = []
    for title, facts in run_plan.sections.items():
        lines += [title.capitalize(), *(f"  {fact.text}" for fact in facts if fact.text)]
    return [*lines, *(["Notes", *(f"  {note}" for note in run_plan.notes)] if run_plan.notes else [])]
