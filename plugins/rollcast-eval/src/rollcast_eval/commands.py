"""``rollcast generate`` and ``rollcast eval``, which sample from a model folder and score the samples."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollcast.contracts.command import ConfigDir, build_console, hide_library_bars, print_lines, show_progress

if TYPE_CHECKING:
    from rollcast_eval.job import SampleJob

__all__ = ["eval_app", "evaluate", "generate", "generate_app"]

logger = logging.getLogger(__name__)
generate_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
eval_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_METRIC = re.compile(r"val/(?:(?P<source>.+)/)?acc/(?P<name>(?P<kind>mean|best|maj)@(?P<k>\d+))(?:/mean)?")
_TITLES = {"mean": "accuracy", "best": "pass@{k}", "maj": "maj@{k}"}

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="OVERRIDES", help="group=option or section.key=value, such as model.path=M rollout.n=8."),
]

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the samples that the file already has.")]


@generate_app.command()
def generate(
    prompts: Annotated[str, typer.Argument(metavar="PROMPTS", help="JSONL or Parquet, with a column `prompt`.")],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="JSONL of samples; goes on where it ends.")],
    overrides: Settings = None,
    config_dir: ConfigDir = None,
    overwrite: Overwrite = False,
) -> None:
    """Write rollout.n samples for each prompt, from the model in model.path."""
    job = _build(prompts, output, overrides, config_dir, scored=False, overwrite=overwrite)
    with _progress(job) as progress:
        rows = job.run(progress)
    print_lines(f"{len(rows)} samples of {len(rows) // job.samples} prompts are in {output}")


@eval_app.command("eval")
def evaluate(
    prompts: Annotated[str, typer.Argument(metavar="PROMPTS", help="JSONL or Parquet, with prompts and answers.")],
    overrides: Settings = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="JSONL of scored samples [default: eval/PROMPTS.jsonl].")
    ] = None,
    config_dir: ConfigDir = None,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="All metrics as a JSON object.")] = False,
) -> None:
    """Score rollout.n samples of each prompt with the reward: accuracy, pass@k and maj@k by data source."""
    from rollcast_rewards.statistics import answer_extractor, summarize_notes, summarize_samples

    target = output or Path("eval") / f"{Path(prompts).stem}.jsonl"
    job = _build(prompts, target, overrides, config_dir, scored=True, overwrite=overwrite)
    with _progress(job) as progress:
        rows = job.run(progress)
    extract = answer_extractor(job.scorer.reward if job.scorer is not None else None)
    metrics = {**summarize_samples(rows, job.samples, extract), **summarize_notes(rows)}
    if as_json:
        typer.echo(json.dumps(metrics, indent=2))
        return
    build_console().print(_table(metrics))
    print_lines(*(f"{name} {value:.4g}" for name, value in metrics.items() if name.startswith("rollout/")))
    print_lines(f"{len(rows)} samples of {len(rows) // job.samples} prompts are in {target}")


def _build(
    prompts: str, output: Path, overrides: list[str] | None, config_dir: Path | None, scored: bool, overwrite: bool
) -> SampleJob:
    from rollcast.contracts.storage import fetch_files
    from rollcast.errors import DataError
    from rollcast_eval.composition import compose_samples

    file = Path(fetch_files([prompts], "PROMPTS")[0])
    if not file.is_file():
        raise DataError(f"there is no file of prompts {prompts}")
    composed = compose_samples(overrides or (), config_dir)
    composed.load_plugins()
    hide_library_bars()
    from rollcast_eval.job import SampleJob

    return SampleJob(composed.config, file, output, scored, overwrite)


@contextmanager
def _progress(job: SampleJob) -> Iterator[Any]:
    total, done = len(job.dataset), len(job.file.rows)
    if done:
        logger.info("%s has the samples of %d of %d prompts already", job.file.path, done, total)
    with show_progress("prompts", total, done) as line:
        yield line.update


def _table(metrics: Mapping[str, float]) -> Any:
    """Return a table with a row per source and a column per measure, each with its 95 % interval."""
    from rich.table import Table

    cells_by_source: dict[str, dict[str, str]] = {}
    for key, value in metrics.items():
        match = _METRIC.fullmatch(key)
        if match is None:
            continue
        stem = key.removesuffix("/mean")
        title = _TITLES[match["kind"]].format(k=match["k"])
        cell = f"{value:.3f} ({metrics[f'{stem}/low']:.3f} to {metrics[f'{stem}/high']:.3f})"
        cells_by_source.setdefault(match["source"] or "all", {})[title] = cell
    titles = list(dict.fromkeys(title for cells in cells_by_source.values() for title in cells))
    table = Table("data source", *titles)
    for source, cells in cells_by_source.items():
        table.add_row(source, *(cells.get(title, "") for title in titles))
    return table
