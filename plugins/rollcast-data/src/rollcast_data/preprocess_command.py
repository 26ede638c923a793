"""The command ``rollcast preprocess``, which converts raw data into the files that a dataset reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollcast.contracts.command import Traceback, print_lines

__all__ = ["app", "preprocess"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def preprocess(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Such as gsm8k; 'rollcast plugins preprocessors' lists them.")
    ],
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="The folder to write into.")],
    source: Annotated[
        Path | None, typer.Option("--input", metavar="DIR", help="The raw data; not needed where a task is generated.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of what is generated or drawn.")] = 0,
    _traceback: Traceback = False,
) -> None:
    """Turn raw data into dataset files, and count their rows."""
    from rollcast.errors import DataError
    from rollcast_data.contract import preprocessors

    preprocessor = preprocessors.get(name, requested_by="rollcast preprocess")()
    if source is not None and not source.exists():
        raise DataError(f"--input {source}: there is no such file or folder")
    if output.exists() and not output.is_dir():
        raise DataError(f"--output {output}: there is a file of that name")
    output.mkdir(parents=True, exist_ok=True)
    report = preprocessor.run(source, output, seed)
    width = max((len(f"{rows:,}") for rows in report.rows.values()), default=0)
    print_lines(*(f"{rows:>{width},} rows  {output / file}" for file, rows in report.rows.items()), *report.notes)
