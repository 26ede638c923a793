"""``rollcast runs``, which lists, compares, diffs, reports and resumes run directories."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollcast.contracts.command import build_console, print_lines
from rollcast.errors import DataError
from rollcast_report.resume import check_resumable, python_command, resume_arguments, resume_command
from rollcast_report.settings import differing_keys, read_settings

if TYPE_CHECKING:
    from rollcast_report.run_data import RunData

__all__ = ["find_runs", "runs_app", "summarize"]

runs_app = typer.Typer(
    help="List, compare, diff, report and resume run directories.",
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
)
#: Largest depth at which run directories are searched.
_DEPTH = 4
#: Metrics of the table of `compare`, where a run has them: name to how its steps become one number.
_COMPARED = {
    "val/accuracy": "last",
    "val/reward": "last",
    "reward/mean": "last",
    "rollout/response_length_mean": "last",
    "actor/kl": "last",
    "sft/loss": "last",
    "time/step_s": "median",
    "perf/throughput": "median",
}
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]


def find_runs(folder: Path) -> list[Path]:
    """Return the run directories at and below a folder, in order of their names; warm starts belong to their runs."""

    def walk(place: Path, depth: int) -> Iterator[Path]:
        if (place / "metrics.jsonl").exists() or (place / "status.json").exists():
            yield place
        elif depth:
            for below in sorted(place.iterdir()):
                if below.is_dir() and not below.is_symlink() and not below.name.startswith("."):
                    yield from walk(below, depth - 1)

    return list(walk(folder, _DEPTH))


def summarize(run: RunData, path: Path) -> dict[str, Any]:
    """Return the summary of a run for the list: state, steps, time, and the last validation."""
    reward = run.values("reward/mean")
    accuracy = run.values("val/accuracy")
    return {
        "run": str(path),
        "state": run.status.state,
        "step": run.steps,
        "total_steps": run.status.total_steps,
        "elapsed_s": round(run.status.elapsed_s, 1),
        "reward": reward[-1] if reward else None,
        "accuracy": accuracy[-1] if accuracy else None,
        "best_accuracy": max(accuracy, default=None),
        "recoveries": len(run.recoveries),
        "resume": resume_command(run.status) if run.status.state in ("interrupted", "failed") else None,
    }


@runs_app.command("list")
def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to search.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the runs below a folder: state, steps, time, reward and accuracy."""
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; name the one that holds your run directories")
    runs = [summarize(_read(path), path) for path in find_runs(folder)]
    if as_json:
        typer.echo(json.dumps(runs, indent=2))
    elif not runs:
        print_lines(f"there is no run in {folder}")
    else:
        _print_table(["run", "state", "step", "time", "reward", "accuracy", "best"], map(_list_row, runs))
        stopped = [run for run in runs if run["resume"]]
        print_lines(*(f"rollcast runs resume {run['run']}   # {run['state']}" for run in stopped))


@runs_app.command()
def compare(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    metric: Annotated[
        list[str] | None, typer.Option("--metric", "-m", help="Metric to compare; may be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the metrics of runs: the last value of each, and the median of times and rates."""
    runs = {str(path): _read(_existing(path)) for path in paths}
    known = {name for run in runs.values() for name in run.series}
    missing = [name for name in metric or () if name not in known]
    if missing:
        raise DataError(f"no run has the metric {missing[0]!r}; there are: {', '.join(sorted(known)) or 'none'}")
    names = metric or [name for name in _COMPARED if name in known]
    table = {name: {path: _reduce(name, run.values(name)) for path, run in runs.items()} for name in names}
    if as_json:
        typer.echo(json.dumps(table, indent=2))
        return
    rows = [[f"{name} ({_how(name)})", *map(_number, table[name].values())] for name in names]
    _print_table(["metric", *runs], rows)


@runs_app.command()
def diff(first: Run, second: Run, as_json: AsJson = False) -> None:
    """Show the configuration keys in which two runs differ; paths inside the run directories are left out."""
    left, right = (read_settings(_existing(path)) for path in (first, second))
    keys = differing_keys([left, right])
    if as_json:
        typer.echo(json.dumps({key: [left.get(key), right.get(key)] for key in keys}, indent=2))
    elif not keys:
        print_lines("no key differs")
    else:
        rows = [[key, json.dumps(left.get(key)), json.dumps(right.get(key))] for key in keys]
        _print_table(["key", str(first), str(second)], rows)


@runs_app.command()
def report(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Page to write [default: RUN/report.html].")
    ] = None,
) -> None:
    """Write the report of a run from its files, also of one that was killed; or one page that compares several runs."""
    from rollcast_report.report import write_report

    for path in paths:
        _existing(path)
    if output is not None and output.is_dir():
        raise DataError(f"--output {output} is a folder; name a file in it")
    if len(paths) == 1:
        print_lines(str(write_report(paths[0], output=output)))
        return
    if output is None:
        raise DataError("a page that compares several runs needs --output FILE")
    from rollcast_report.comparison import write_comparison

    print_lines(str(write_comparison(paths, output)))


@runs_app.command()
def resume(
    run: Run,
    execute: Annotated[bool, typer.Option("--execute", help="Run the command instead of printing it.")] = False,
) -> None:
    """Print the command that resumes a run which was interrupted or failed, with its overrides as recorded."""
    status = _read(_existing(run)).status
    check_resumable(run, status, status.state)
    if not execute:
        print_lines(str(resume_command(status)))
        return
    command = python_command(resume_arguments(status))
    if status.folder:
        if not Path(status.folder).is_dir():
            raise DataError(f"the run was started in {status.folder}, which is gone; make it, or start it elsewhere")
        os.chdir(status.folder)
    sys.stdout.flush()
    # This process becomes the run, so that signals and exit codes are the run's own.
    os.execv(command[0], command)  # noqa: S606  # no shell is wanted


def _existing(path: Path) -> Path:
    if not path.is_dir():
        raise DataError(f"{path} is no run directory: there is no such folder")
    return path


def _read(path: Path) -> RunData:
    from rollcast_report.run_data import read_run

    return read_run(path, parts=("metrics", "recoveries"))


def _how(name: str) -> str:
    return _COMPARED.get(name, "last")


def _reduce(name: str, values: Sequence[float]) -> float | None:
    if not values:
        return None
    return statistics.median(values) if _how(name) == "median" else values[-1]


def _list_row(run: Mapping[str, Any]) -> list[str]:
    step = "-" if run["step"] is None else str(run["step"])
    minutes, seconds = divmod(int(run["elapsed_s"]), 60)
    return [
        run["run"],
        run["state"],
        f"{step}/{run['total_steps']}" if run["total_steps"] else step,
        f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}",
        *(_number(run[name]) for name in ("reward", "accuracy", "best_accuracy")),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _print_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for place, header in enumerate(headers):
        table.add_column(Text(header), justify="left" if place == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    build_console().print(table)
