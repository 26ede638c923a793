"""The command ``rollcast profile``: measure a recipe's passes, generation and weight sync on the local devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollcast.contracts.command import (
    ConfigDir,
    Overrides,
    build_console,
    hide_library_bars,
    print_lines,
    show_progress,
)

if TYPE_CHECKING:
    from rollcast_automap.profiling.cost_job import Grid
    from rollcast_automap.profiling.costs import CostTable, Measurement, Phase
    from rollcast_trainer.api import RunSettings

__all__ = ["app", "profile"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
#: Default for the largest measured number of rows in a pass.
_MOST_ROWS = 64
#: Least width of the table in characters, so that output to a pipe is not cut.
_WIDTH = 110


@app.command()
def profile(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="JSON file to write [default: profiles/RUN/costs.json].")
    ] = None,
    phases: Annotated[
        str, typer.Option("--phases", help="Phases to measure, a part of the default, separated by commas.")
    ] = "prefill,decode,forward,forward_backward,backward,optimizer,sync",
    batch_sizes: Annotated[
        str | None, typer.Option("--batch-sizes", help="Rows of one data-parallel rank [default: from the recipe].")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option("--lengths", help="Tokens of a row [default: from the recipe's longest row].")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Repetitions, after one warm-up.")] = 3,
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", min=1, help="Number of tokens over which decode is averaged.")
    ] = 16,
    response_share: Annotated[
        float | None,
        typer.Option(
            "--response-share",
            min=0.0,
            max=1.0,
            help="Fraction of response tokens in a row [default: from the recipe's longest row].",
        ),
    ] = None,
) -> None:
    """Measure prefill, decode, forward, backward, optimizer and weight sync of a recipe, by batch and length.

    Accepts the arguments of 'rollcast train' and starts the recipe's workers. Trained weights are discarded.
    """
    hide_library_bars()
    settings, target = _build(overrides or [], config_dir, output)
    from rollcast_automap.profiling.cost_job import CostJob

    grid = _grid(settings, phases, batch_sizes, lengths, repeats, new_tokens)
    job = CostJob(settings, replace(grid, response_share=response_share))
    with show_progress("measuring") as line:
        table = job.run(lambda what: line.update(done=line.done + 1, note=what))
    table.write(target)
    console = build_console()
    console.width = max(console.width, _WIDTH)
    console.print(_render(table))
    print_lines(f"{len(table.measurements)} measurements on {table.device.name} are in {target}")


def _build(overrides: list[str], config_dir: Path | None, output: Path | None) -> tuple[RunSettings, Path]:
    """Return the recipe's settings, with a run directory next to the output file, and the path of that file."""
    from rollcast import compose, format_override
    from rollcast.errors import ConfigError
    from rollcast_trainer.api import check_run

    composed = compose(overrides, config_dir, needs_trainer=True)
    target = output or Path("profiles") / Path(composed.config.run_dir).name / "costs.json"
    if target.is_dir():
        raise ConfigError(f"--output {target} is a folder; name a file in it")
    own = [
        format_override("run_dir", str(target.with_suffix(""))),
        "trackers=[]",
        "profiler.tool=null",
        "trainer.warm_start=null",
        "trainer.total_steps=1",
        "runtime.record=null",
    ]
    composed = compose([*overrides, *own], config_dir)
    composed.load_plugins()
    return check_run(composed.config), target


def _grid(
    settings: RunSettings, phases: str, batch_sizes: str | None, lengths: str | None, repeats: int, new_tokens: int
) -> Grid:
    from rollcast_automap.memory.role_specs import largest_pass
    from rollcast_automap.profiling.cost_job import Grid
    from rollcast_automap.profiling.costs import check_sizes

    data = settings.data
    longest = data.max_prompt_length + data.max_response_length
    if lengths is None:
        most = max(longest - new_tokens, 2)
        wanted = check_sizes("--lengths", [max(most // 4, 2), max(most // 2, 2), most])
    else:
        wanted = check_sizes("--lengths", _numbers("--lengths", lengths))
    if batch_sizes is None:
        rows = min(largest_pass(settings.algebra, longest), _MOST_ROWS)
        batches = check_sizes("--batch-sizes", [1, max(rows // 4, 1), rows])
    else:
        batches = check_sizes("--batch-sizes", _numbers("--batch-sizes", batch_sizes))
    return Grid(_phases(phases), batches, wanted, repeats, new_tokens)


def _numbers(option: str, text: str) -> list[int]:
    from rollcast.errors import ConfigError

    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} is {text!r}; give whole numbers with commas between, such as 1,8,64") from error


def _phases(text: str) -> list[Phase]:
    from rollcast.errors import ConfigError
    from rollcast_automap.profiling.costs import PHASES

    wanted = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [part for part in wanted if part not in PHASES]
    if unknown or not wanted:
        raise ConfigError(f"--phases is {text!r}; valid: {', '.join(PHASES)}")
    return [phase for phase in PHASES if phase in wanted]


def _render(table: CostTable) -> Any:
    from rich.table import Table

    shown = Table("role", "phase", "rows", "tokens", "seconds", "tokens/s", "TFLOP/s", "peak memory")
    for column in shown.columns[2:]:
        column.justify = "right"
    for measurement in table.measurements:
        shown.add_row(measurement.role, measurement.phase, *_cells(measurement, table))
    return shown


def _cells(measurement: Measurement, table: CostTable) -> Sequence[str]:
    from rollcast_automap.memory.memory_facts import format_bytes

    sizes = (str(measurement.batch_size), str(measurement.length)) if measurement.batch_size else ("", "")
    peak = "" if measurement.peak_bytes is None else format_bytes(measurement.peak_bytes)
    if measurement.seconds is None:
        return (*sizes, "out of memory", "", "", peak)
    seconds = max(measurement.seconds, 1e-12)
    rate = (
        f"{measurement.tokens * table.roles[measurement.role].data_parallel / seconds:,.0f}"
        if measurement.tokens
        else ""
    )
    flops = "" if measurement.flops is None else f"{measurement.flops / seconds / 1e12:.3g}"
    return (*sizes, f"{measurement.seconds:.3g}", rate, flops, peak)
