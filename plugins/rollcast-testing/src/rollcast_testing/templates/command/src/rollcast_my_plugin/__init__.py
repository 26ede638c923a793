"""The command ``rollcast my_plugin``: the best steps of a run by one of its metrics."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rollcast.contracts.command import Traceback, print_lines
from rollcast.errors import DataError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command("my_plugin")
def best(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run with metrics.jsonl.")],
    metric: Annotated[str, typer.Option(help="Name of the metric; more is better.")] = "val/accuracy",
    count: Annotated[int, typer.Option(min=1, help="Number of steps to show.")] = 3,
    _traceback: Traceback = False,
) -> None:
    """Show the best steps of a run by a metric."""
    file = run_dir / "metrics.jsonl"
    if not file.is_file():
        raise DataError(f"there is no {file}; the run needs the tracker jsonl")
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    ranked = sorted((row for row in rows if row.get(metric) is not None), key=lambda row: -row[metric])
    if not ranked:
        raise DataError(
            f"{file} has no metric {metric!r}; it has: {', '.join(sorted({key for row in rows for key in row}))}"
        )
    print_lines(*(f"step {row['step']:>6}  {row[metric]:.4g}" for row in ranked[:count]))
