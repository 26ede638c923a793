"""The command ``rollcast preprocess``, which converts raw data into the files that a dataset reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollcast.contracts.command import Traceback, print_lines, show_progress

__all__ = ["app", "preprocess"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def preprocess(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Preprocessor, such as gsm8k; see 'rollcast plugins preprocessors'.")
    ],
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="Folder for the dataset files.")],
    source: Annotated[
        Path | None,
        typer.Option("--input", metavar="DIR", help="Folder with the raw data; omit it for generated tasks."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed for generating or sampling data.")] = 0,
    _traceback: Traceback = False,
) -> None:
    """Convert raw data to dataset files, and show the number of rows."""
    from rollcast.errors import DataError
    from rollcast_data.contract import preprocessors

    preprocessor = preprocessors.get(name, requested_by="rollcast preprocess")()
    if source is not None and not source.exists():
        raise DataError(f"--input {source}: there is no such file or folder")
    if output.exists() and not output.is_dir():
        raise DataError(f"--output {output}: there is a file of that name")
    output.mkdir(parents=True, exist_ok=True)
    with show_progress(f"preprocessing {name}"):
        report = preprocessor.run(source, output, seed)
    width = max((len(f"{rows:,}") for rows in report.rows.values()), default=0)
    print_lines(*(f"{rows:>{width},} rows  {output / file}" for file, rows in report.rows.items()), *report.notes)
