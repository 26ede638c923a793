"""``rollcast replay-trajectories`` and ``rollcast validate-task``: rewards and environments without a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from rollcast.contracts.command import ConfigDir, print_lines, show_progress
from rollcast.errors import ConfigError, DataError

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["replay_app", "replay_trajectories", "validate_app", "validate_task"]

replay_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
validate_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_SHOWN = 5
"""Maximum number of faulty rows that are printed."""

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="OVERRIDES", help="group=option or section.key=value, such as reward=gsm8k."),
]


@replay_app.command("replay-trajectories")
def replay_trajectories(
    trajectories: Annotated[
        Path,
        typer.Argument(metavar="TRAJECTORIES", help="A run directory, its folder `trajectories`, or one file of it."),
    ],
    overrides: Settings = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="JSON Lines file for the rescored trajectories.")
    ] = None,
    config_dir: ConfigDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as a JSON object.")] = False,
) -> None:
    """Score saved trajectories again, without a model: with the run's reward, or with another one.

    Rewards from an environment, a loop or a tool stay as recorded.
    """
    from rollcast_agents.records import find_records, save_records
    from rollcast_agents.rescoring import rescore

    records = find_records(trajectories)
    config = _compose_for_run(trajectories, overrides or (), config_dir)
    with show_progress(f"scoring {len(records)} trajectories"):
        scored, figures = rescore(records, config)
    if output is not None:
        save_records(output, scored)
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
        return
    print_lines(*(f"{name:<24}{value:.6g}" for name, value in figures.items()))
    if output is not None:
        print_lines(f"{len(scored)} trajectories written to {output}")


@validate_app.command("validate-task")
def validate_task(
    prompts: Annotated[Path, typer.Argument(metavar="PROMPTS", help="JSONL or Parquet, with prompts and answers.")],
    overrides: Settings = None,
    answer: Annotated[
        str, typer.Option("--answer", help="A correct reply, with {ground_truth} in place of the row's answer.")
    ] = "{ground_truth}",
    rows: Annotated[int, typer.Option("--rows", min=1, help="Number of rows to check, from the first.")] = 100,
    config_dir: ConfigDir = None,
) -> None:
    """Check a task without a model: correct replies score, empty ones do not, and episodes start deterministically.

    Checks `agent.environment` if one is set, else the reward. If an environment knows its solution, that is used
    instead of --answer. Exits with code 1 if a row fails.
    """
    from rollcast_agents.validation import validate_rows

    if not prompts.is_file():
        raise DataError(f"there is no file of prompts {prompts}")
    # No model is read, but its key has no default.
    report = validate_rows(prompts, _compose(["model.path=unused", *(overrides or ())], config_dir), answer, rows)
    print_lines(*(f"row {row}: {fault}" for row, fault in report.faults[:_SHOWN]))
    if len(report.faults) > _SHOWN:
        print_lines(f"and {len(report.faults) - _SHOWN} more")
    print_lines(f"{report.rows} rows checked with {report.judge}, {len(report.faults)} faults")
    if report.unknown:
        print_lines(f"no correct reply is known for {report.unknown} of them; pass one with --answer")
    if report.faults:
        raise typer.Exit(1)


def _compose(overrides: Sequence[str], config_dir: Path | None) -> DictConfig:
    try:
        from rollcast_eval.composition import compose_samples
    except ImportError as error:
        raise ConfigError(
            f'this command needs the rewards and data of a trainer: pip install "rollcast-agents[trainer]" ({error})'
        ) from error
    composed = compose_samples(overrides, config_dir)
    composed.load_plugins()
    return composed.config


def _compose_for_run(place: Path, overrides: Sequence[str], config_dir: Path | None) -> DictConfig:
    """Return the config of ``overrides``; reward and model default to those of the run."""
    from omegaconf import OmegaConf

    from rollcast import format_override

    folder = place if place.is_dir() else place.parent
    run_dir = next((parent for parent in (folder, folder.parent) if (parent / "config.yaml").is_file()), None)
    if run_dir is None:
        return _compose(overrides, config_dir)
    saved: Any = OmegaConf.load(run_dir / "config.yaml")
    config = _compose([format_override("model.path", str(saved.model.path)), *overrides], config_dir)
    if any(override.lstrip("+~").startswith("reward") for override in overrides):
        return config
    return cast("DictConfig", OmegaConf.merge(config, {"reward": saved.reward}))
