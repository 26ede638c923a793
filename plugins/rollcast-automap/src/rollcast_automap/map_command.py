"""The command ``rollcast map``: search a placement for each role and predict the duration of a step."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from rollcast.contracts.command import ConfigDir, Overrides, build_console, print_lines, show_progress
from rollcast.errors import ConfigError

if TYPE_CHECKING:
    from rollcast_automap.contract import BaseCostModel, Lengths, Prediction, Problem
    from rollcast_automap.measured.check import Compared, RunCheck
    from rollcast_automap.simulation.mapping_simulation import SimulatedMapping
    from rollcast_trainer.api import RunSettings

__all__ = ["app", "map_roles", "take_section"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
S = TypeVar("S")
_LENGTHS = typer.Option(
    "--lengths",
    metavar="PATH",
    help="File with one response length in tokens per line, or a run directory, which has prompt lengths too.",
)


@app.command(name="map")
def map_roles(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    planner: Annotated[str, typer.Option("--planner", help="Registry name of the planner.")] = "branch_and_bound",
    cost_model: Annotated[str, typer.Option("--cost-model", help="Registry name of the cost model.")] = "analytical",
    count: Annotated[int, typer.Option("--count", min=1, help="Number of mappings to show, best first.")] = 3,
    mean_length: Annotated[
        float | None,
        typer.Option("--mean-length", min=1.0, help="Mean response length in tokens; default: half of the longest."),
    ] = None,
    lengths_file: Annotated[Path | None, _LENGTHS] = None,
    read_data: Annotated[
        bool, typer.Option("--read-data", help="Tokenize training prompts to measure their lengths.")
    ] = False,
    staleness: Annotated[
        int, typer.Option("--staleness", min=0, help="Largest trainer.max_staleness to consider.")
    ] = 0,
    explain: Annotated[
        bool, typer.Option("--explain", help="Compare the stage costs of the two best mappings.")
    ] = False,
    write: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", help="Write the best mapping to FILE, for 'mapping=FILE'.")
    ] = None,
    check: Annotated[
        list[Path] | None,
        typer.Option("--check", metavar="RUN", help="Run directory to compare with its prediction; repeatable."),
    ] = None,
    simulate: Annotated[
        Path | None,
        typer.Option(
            "--simulate", metavar="FILE", help="Simulate the best mapping (two with --explain) and write a Gantt chart."
        ),
    ] = None,
    simulate_steps: Annotated[int, typer.Option("--simulate-steps", min=1, help="Steps to simulate.")] = 5,
    simulate_seed: Annotated[int, typer.Option("--simulate-seed", help="Seed of the drawn lengths.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Search the fastest placement of each role: pools, meshes and micro-batches, with the predicted step time.

    Accepts the arguments of 'rollcast train' and three more sections: cluster.* (nodes, devices_per_node, device,
    groups of different nodes, network_gbit_s, and figures of the device), constraints.* (pinned, together, apart,
    headroom), and cost_model.* with the keys of the cost model. docs/cost-models.md lists the measured errors of the
    predictions. --check skips the search and compares finished runs with their predictions, stage by stage.
    """
    if check:
        _check_runs(check, overrides or (), cost_model, as_json)
        return
    from rollcast import compose
    from rollcast_automap.contract import cost_models, planners
    from rollcast_automap.costs.clusters import ClusterConfig, build_cluster
    from rollcast_automap.problem import build_problem, list_overrides
    from rollcast_automap.search.constraints import ConstraintsConfig
    from rollcast_trainer.api import check_run

    cluster, rest = take_section(ClusterConfig, "cluster", overrides or ())
    limits, rest = take_section(ConstraintsConfig, "constraints", rest)
    kind = cost_models.get(cost_model, "--cost-model")
    section, rest = take_section(kind.config_schema, "cost_model", rest)
    composed = compose(rest, config_dir, needs_trainer=True)
    composed.load_plugins()
    settings = check_run(composed.config)
    prompt, response = _read_lengths(settings, lengths_file, mean_length, read_data)
    problem = build_problem(settings, build_cluster(cluster), response, staleness, limits, prompt)
    costs = kind(section)
    with show_progress("searching placements"):
        predictions = list(planners.get(planner, "--planner")().plan(problem, costs, max(count, 2 if explain else 1)))
    texts = [list_overrides(settings, problem, prediction.mapping) for prediction in predictions]
    if write is not None:
        _write(write, predictions[0], texts[0])
    runs: list[SimulatedMapping] = []
    if simulate is not None:
        runs = _simulate(simulate, problem, predictions[: 2 if explain else 1], costs, simulate_steps, simulate_seed)
    if as_json:
        rows = [_as_dict(prediction, text) for prediction, text in zip(predictions[:count], texts, strict=False)]
        for row, run in zip(rows, runs, strict=False):
            row["simulation"] = run.as_dict()
        typer.echo(json.dumps(rows, indent=2))
        return
    _print_table(predictions[:count], problem)
    if explain:
        print_lines(*_explain(predictions))
    for number, run in enumerate(runs):
        print_lines(*_compare(problem, predictions[number], run, number + 1))
    if simulate is not None:
        print_lines(f"wrote {simulate}")
    if write is not None:
        print_lines(f"wrote {write}; rollcast train ... mapping={write} takes it")


def _simulate(
    path: Path, problem: Problem, predictions: Sequence[Prediction], costs: BaseCostModel, steps: int, seed: int
) -> list[SimulatedMapping]:
    """Simulate mappings and write their Gantt chart."""
    from rollcast.contracts.files import replace_file
    from rollcast_automap.simulation.gantt_page import render_gantt
    from rollcast_automap.simulation.mapping_simulation import simulate_mapping

    runs = [simulate_mapping(problem, prediction.mapping, costs, steps, seed) for prediction in predictions]
    title = f"{problem.rows:,} rows a step on {problem.cluster.devices:,} devices"
    try:
        replace_file(path, render_gantt(problem, list(zip(predictions, runs, strict=True)), title))
    except OSError as error:
        raise ConfigError(f"--simulate {path}: the file cannot be written: {error}") from error
    return runs


def _compare(problem: Problem, prediction: Prediction, run: SimulatedMapping, number: int) -> list[str]:
    """Return lines that compare the simulated figures of a mapping with the predicted ones."""
    from rollcast_automap.composition import busy_shares

    expected, predicted = busy_shares(problem, prediction), prediction.step_seconds
    lines = [
        f"mapping {number}, simulated: {run.step_seconds:.3g} s a step, the mean of {len(run.step_times)}; "
        f"{predicted:.3g} s predicted ({predicted / run.step_seconds - 1:+.1%})"
    ]
    return lines + [f"  {pool}: busy {share:.0%}, {expected[pool]:.0%} predicted" for pool, share in run.busy().items()]


def _check_runs(folders: Sequence[Path], overrides: Sequence[str], cost_model: str, as_json: bool) -> None:
    """Print the predicted and the measured figures of finished runs."""
    from rollcast_automap.contract import cost_models
    from rollcast_automap.measured.check import as_dict, check_run
    from rollcast_automap.measured.measured_run import read_run

    kind = cost_models.get(cost_model, "--cost-model")
    section, rest = take_section(kind.config_schema, "cost_model", overrides)
    devices = [text.removeprefix("cluster.device=") for text in rest if text.startswith("cluster.device=")]
    others = [text for text in rest if not text.startswith("cluster.device=")]
    if others:
        raise ConfigError(
            f"--check reads the configuration of a run from its directory, so {', '.join(others)} has no effect; it "
            "takes cluster.device and cost_model.*"
        )
    costs = kind(section)
    checks = [check_run(read_run(folder, devices[-1] if devices else None), costs) for folder in folders]
    if as_json:
        typer.echo(json.dumps([as_dict(run_check) for run_check in checks], indent=2))
        return
    for check in checks:
        build_console().print(_check_table(check))


def _check_table(check: RunCheck) -> Any:
    from rich.table import Table

    from rollcast_automap.memory.memory_facts import format_bytes

    table = Table("", "predicted", "measured", "off by", "", title=str(check.folder), title_justify="left")
    for column in table.columns[1:4]:
        column.justify = "right"

    def row(name: str, pair: Compared, show: Callable[[float], str]) -> None:
        shown = ["" if value is None else show(value) for value in (pair.predicted, pair.measured)]
        table.add_row(name, *shown, "" if pair.error is None else f"{pair.error:+.0%}", pair.note)

    for name, pair in check.stages.items():
        row(name, pair, "{:.3g} s".format)
    table.add_section()
    row("step", check.step, "{:.3g} s".format)
    row("memory", check.memory, lambda value: format_bytes(round(value)))
    return table


def _read_lengths(
    settings: RunSettings, path: Path | None, mean_length: float | None, read_data: bool
) -> tuple[Lengths | None, Lengths | float | None]:
    """Return the prompt and response lengths of the options: statistics or a mean; None if an option is not set."""
    from rollcast_automap.costs.length_curve import LengthCurve, read_samples
    from rollcast_automap.costs.run_lengths import measure_prompts, read_run_lengths

    prompt: Lengths | None = None
    response: Lengths | float | None = mean_length
    if path is not None and mean_length is not None:
        raise ConfigError(f"--mean-length {mean_length:g} and --lengths {path} both describe the responses; choose one")
    data = settings.data
    if path is not None and path.is_dir():
        lengths = read_run_lengths(path, (data.max_prompt_length, data.max_response_length))
        prompt, response = lengths.prompt, lengths.response
    elif path is not None:
        longest = data.max_response_length
        response = LengthCurve.from_samples(read_samples(path, longest)).statistics(longest)
    return measure_prompts(settings) if read_data else prompt, response


def take_section(schema: type[S], path: str, overrides: Sequence[str]) -> tuple[S, list[str]]:
    """Return the section built from the overrides that start with ``path``, and the remaining overrides."""
    from omegaconf import OmegaConf

    from rollcast import build_section

    prefix = f"{path}."
    own = [text.removeprefix(prefix) for text in overrides if text.startswith(prefix)]
    options: Any = OmegaConf.to_container(OmegaConf.from_dotlist(own))
    section = build_section(schema, options, path, closed=True)
    return section, [text for text in overrides if not text.startswith(prefix)]


def _write(path: Path, best: Prediction, overrides: Sequence[str]) -> None:
    lines = [
        f"# Written by rollcast map; predicted step time: {best.step_seconds:.3g} s.",
        "overrides:",
        *(f"  - {json.dumps(text)}" for text in overrides),
    ]
    try:
        path.write_text("\n".join(lines) + "\n")
    except OSError as error:
        raise ConfigError(f"--write {path}: the file cannot be written: {error}") from error


def _as_dict(prediction: Prediction, overrides: Sequence[str]) -> dict[str, Any]:
    return {
        "step_seconds": prediction.step_seconds,
        "tokens_per_second": prediction.tokens_per_second,
        "mode": prediction.mapping.mode,
        "max_staleness": prediction.mapping.max_staleness,
        "pools": {pool.name: list(pool.process_on_nodes) for pool in prediction.mapping.pools},
        "roles": {
            placement.role: {
                "pool": placement.pool,
                "data": placement.mesh.data,
                "tensor": placement.mesh.tensor,
                "pipeline": placement.mesh.pipeline,
                "micro_batch_rows": placement.micro_batch_rows,
                "bytes": prediction.memory[placement.role].total,
            }
            for placement in prediction.mapping.placements
        },
        "stages": {
            name: {"seconds": cost.seconds, **cost.parts, "note": cost.note} for name, cost in prediction.stages.items()
        },
        "device_bytes": dict(prediction.device_bytes),
        "overrides": list(overrides),
    }


def _print_table(predictions: Sequence[Prediction], problem: Problem) -> None:
    from rich.table import Table

    from rollcast_automap.memory.memory_facts import format_bytes

    table = Table(title=f"{problem.cluster.devices} devices, {problem.rows} rows a step")
    for title in ("", "step", "tokens/s", "mode", "pools", "memory", "limits"):
        table.add_column(title)
    for number, prediction in enumerate(predictions, 1):
        longest = max(prediction.stages, key=lambda name: prediction.stages[name].seconds)
        table.add_row(
            str(number),
            f"{prediction.step_seconds:.3g} s",
            f"{prediction.tokens_per_second:,.0f}",
            prediction.mapping.mode
            + (f", {prediction.mapping.max_staleness} ahead" if prediction.mapping.max_staleness else ""),
            "\n".join(_describe_pools(prediction)),
            "\n".join(format_bytes(prediction.device_bytes[pool.name]) for pool in prediction.mapping.pools),
            f"{longest}: {prediction.stages[longest].limit}",
        )
    build_console().print(table)


def _describe_pools(prediction: Prediction) -> list[str]:
    lines = []
    for pool in prediction.mapping.pools:
        roles = [
            f"{placement.role} {placement.mesh.data}x{placement.mesh.tensor}x{placement.mesh.pipeline} of "
            f"{placement.micro_batch_rows}"
            for placement in prediction.mapping.placements
            if placement.pool == pool.name
        ]
        lines.append(f"{pool.devices}: {', '.join(roles)}")
    return lines


def _explain(predictions: Sequence[Prediction]) -> list[str]:
    """Return a line per stage with the parts of its cost in the two best mappings, in seconds."""
    if len(predictions) < 2:
        return ["there is no second mapping to compare with"]
    lines = []
    for name in dict.fromkeys([*predictions[0].stages, *predictions[1].stages]):
        costs = [prediction.stages.get(name) for prediction in predictions[:2]]
        shown = [
            "not there"
            if cost is None
            else f"{cost.seconds:.3g} s ("
            + ", ".join(f"{part} {value:.2g}" for part, value in cost.parts.items() if value)
            + ")"
            for cost in costs
        ]
        lines.append(f"{name}: {shown[0]} against {shown[1]}")
    return lines
