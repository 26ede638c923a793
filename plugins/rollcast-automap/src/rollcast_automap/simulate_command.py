"""The command ``rollcast simulate``: predict the speed of a run whose rollouts start ahead of training."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollcast.contracts.command import ConfigDir, Overrides, build_console, track
from rollcast.errors import ConfigError
from rollcast_automap.costs.length_curve import read_samples

if TYPE_CHECKING:
    from rollcast_serving.contracts.admission import BaseAdmission
    from rollcast_serving.simulation import TrainingPlan

__all__ = ["SimulatedRow", "app", "read_lengths", "simulate", "simulate_row"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Lengths = Callable[[int], Sequence[float]]


@dataclass(frozen=True)
class SimulatedRow:
    """Figures of one simulated run.

    Attributes:
        max_staleness: value of ``trainer.max_staleness``.
        step_s: mean duration of a step in seconds.
        speedup: duration of the run that takes turns, divided by this one's.
        trainer_waits: fraction of the time in which the trainer waits for rollouts.
        engines_busy: fraction of the engines' sequence slots that compute.
        mean_age: mean age of a trained group, in versions.
        max_age: largest age of a trained group, in versions.
        age_bound: age that the admission guarantees; None if it guarantees none.
        dropped: groups that were generated and never trained.
    """

    max_staleness: int
    step_s: float
    speedup: float
    trainer_waits: float
    engines_busy: float
    mean_age: float
    max_age: int
    age_bound: int | None
    dropped: int


@app.command()
def simulate(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    train_seconds: Annotated[
        float, typer.Option("--train-seconds", min=0.0, help="Duration of a step's training, without generation.")
    ] = 10.0,
    sync_seconds: Annotated[float, typer.Option("--sync-seconds", min=0.0, help="Duration of a weight sync.")] = 0.5,
    tokens_per_second: Annotated[
        float, typer.Option("--tokens-per-second", min=0.001, help="Tokens per second of one sequence.")
    ] = 50.0,
    replicas: Annotated[int, typer.Option("--replicas", min=1, help="Number of engines.")] = 1,
    slots: Annotated[int, typer.Option("--slots", min=1, help="Sequences that an engine decodes at once.")] = 256,
    mean_length: Annotated[
        float | None,
        typer.Option(
            "--mean-length", min=1.0, help="Mean response length in tokens; default: a quarter of the longest."
        ),
    ] = None,
    sigma: Annotated[
        float, typer.Option("--sigma", min=0.0, help="Spread of the log-normal lengths; 0 for equal lengths.")
    ] = 1.0,
    lengths_file: Annotated[
        Path | None,
        typer.Option("--lengths", metavar="FILE", help="File to draw lengths from: one token count per line."),
    ] = None,
    staleness: Annotated[
        str, typer.Option("--staleness", help="Values of trainer.max_staleness to compare.")
    ] = "0,1,2,4",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Training steps.")] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Simulate a run's steps on a simulated clock, for several values of trainer.max_staleness.

    Batch size, samples and the longest response come from the recipe; speeds and lengths come from the options. The
    table shows the share of time in which the trainer waits, the share of engine slots that are busy, and the ages of
    trained rollouts in versions of the weights, with the bound that the admission guarantees.
    """
    from rollcast import compose
    from rollcast_serving.contracts.admission import AdmissionSettings, admissions
    from rollcast_serving.simulation import TrainingPlan
    from rollcast_trainer.api import check_run

    values = _values(staleness)
    composed = compose(overrides or (), config_dir, needs_trainer=True)
    composed.load_plugins()
    settings = check_run(composed.config)
    if not any(place.spec.is_recorded for place in settings.places):
        raise ConfigError(
            f"trainer.name={composed.config.trainer.name} generates nothing; simulate a trainer such as ppo"
        )
    size, longest, samples = settings.data.train_batch_size, settings.data.max_response_length, settings.rollout.n
    if lengths_file is None:
        lengths = draw_lengths(mean_length or longest / 4, sigma, longest, samples)
    else:
        lengths = read_lengths(lengths_file, longest, samples)
    plan = TrainingPlan(steps, size, train_seconds, sync_seconds, tokens_per_second, replicas, slots)
    admission = admissions.get(settings.trainer.admission)
    rows: list[SimulatedRow] = []
    turns_s: float | None = None
    for value in track(values, "simulated runs"):
        turns_s = turns_s or _turns_seconds(lengths, plan)
        rows.append(simulate_row(admission(AdmissionSettings(value, size)), lengths, plan, turns_s))
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        _print(rows, settings.trainer.admission)


def simulate_row(admission: BaseAdmission, lengths: Lengths, plan: TrainingPlan, turns_s: float) -> SimulatedRow:
    """Simulate one run and return its figures.

    Args:
        admission: policy that decides when a group of samples starts.
        lengths: function from a prompt's number to the tokens of each of its sequences.
        plan: sizes and speeds.
        turns_s: duration of the run that takes turns, in seconds.
    """
    from rollcast_serving.simulation import simulate_training

    run = simulate_training(admission, lengths, plan)
    ages = [age for step in run.steps for age in step.ages]
    return SimulatedRow(
        max_staleness=admission.settings.max_staleness,
        step_s=run.seconds / len(run.steps),
        speedup=turns_s / run.seconds,
        trainer_waits=sum(step.waited_s for step in run.steps) / run.seconds,
        engines_busy=run.busy,
        mean_age=sum(ages) / len(ages),
        max_age=max(ages),
        age_bound=admission.max_age,
        dropped=run.dropped,
    )


def _turns_seconds(lengths: Lengths, plan: TrainingPlan) -> float:
    from rollcast_serving.admissions import WindowedFifo
    from rollcast_serving.contracts.admission import AdmissionSettings
    from rollcast_serving.simulation import simulate_training

    return simulate_training(WindowedFifo(AdmissionSettings(0, plan.groups_per_step)), lengths, plan).seconds


def draw_lengths(mean: float, sigma: float, longest: int, samples: int) -> Lengths:
    """Return log-normal lengths, fixed per prompt; ``mean`` is their mean before they are cut at ``longest``."""

    def lengths(prompt: int) -> list[float]:
        drawn = random.Random(prompt)  # noqa: S311  # no secret
        return [
            min(max(mean * drawn.lognormvariate(-sigma * sigma / 2, sigma), 1.0), float(longest))
            for _ in range(samples)
        ]

    return lengths


def read_lengths(path: Path, longest: int, samples: int) -> Lengths:
    """Return lengths drawn from a file with one token count per line, cut at ``longest``.

    Raises:
        DataError: the file cannot be read, or a line is not a positive number; names the line.
    """
    read_lengths = read_samples(path, longest)

    def lengths(prompt: int) -> list[float]:
        return random.Random(prompt).choices(read_lengths, k=samples)  # noqa: S311  # no secret

    return lengths


def _values(text: str) -> list[int]:
    values = [part.strip() for part in text.split(",")]
    if not all(value.isdigit() for value in values):
        raise ConfigError(f"--staleness is {text!r}; it takes numbers of 0 or more with commas, such as 0,1,2,4")
    return [int(value) for value in values]


def _print(rows: Sequence[SimulatedRow], admission: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=f"trainer.admission={admission}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    names = ("stale", "step (s)", "speedup", "waits", "busy", "age", "oldest", "bound", "dropped")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.max_staleness),
            f"{row.step_s:.2f}",
            f"{row.speedup:.2f}",
            f"{row.trainer_waits:.0%}",
            f"{row.engines_busy:.0%}",
            f"{row.mean_age:.2f}",
            str(row.max_age),
            "none" if row.age_bound is None else str(row.age_bound),
            str(row.dropped),
        )
    build_console().print(table)
