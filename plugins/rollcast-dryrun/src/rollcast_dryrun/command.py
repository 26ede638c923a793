"""The command ``rollcast dryrun``: run a step of a run's models on devices that are not there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Annotated

import typer

from rollcast.contracts.command import ConfigDir, Overrides, print_lines, show_progress
from rollcast.errors import ConfigError

if TYPE_CHECKING:
    from rollcast.contracts.pools import ResourcePool
    from rollcast_automap.contract import Cluster
    from rollcast_dryrun.report import PoolReport, RankReport
    from rollcast_trainer.api import RunSettings

__all__ = ["app", "dry_run_pools", "dryrun"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
#: Processes that run at once.
_PROCESSES = 2
_EXPLAINED = 5
_DRY_RUN = "rollcast_dryrun.recipe:dry_run_rank"


@app.command()
def dryrun(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the lines of code that hold most of the memory, by phase.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object: pool to report.")] = False,
    packages: Annotated[
        Path | None,
        typer.Option("--packages", help="Folder with packages that the cluster has: pip's --target."),
    ] = None,
) -> None:
    """Execute a step of a run's models for CUDA devices on a machine without one, and show what it takes.

    Accepts the arguments of 'rollcast train' and the section cluster.* of 'rollcast map', of which it takes the figures
    of the device and its links; the nodes are those of placement.*. The models' own code runs on the first and the last
    rank, on tensors without memory; the rollout does not, so its memory is that of 'rollcast plan'. Megatron's layers
    are Transformer Engine's if --packages has its Python part. Needs a C++ compiler, and of the model only its
    config.json and tokenizer. Ends with exit code 1 if the run does not fit or breaks a rule of streams.
    """
    from rollcast import compose
    from rollcast_automap.costs.clusters import ClusterConfig, build_cluster
    from rollcast_automap.map_command import take_section
    from rollcast_dryrun.native import require_compiler
    from rollcast_trainer.api import check_run

    require_compiler()
    if packages is not None and not packages.is_dir():
        raise ConfigError(f"--packages is {packages}, which is no folder; make it with pip install --target {packages}")
    section, rest = take_section(ClusterConfig, "cluster", overrides or ())
    cluster = build_cluster(section)
    if len({node.kind.name for node in cluster.nodes}) > 1:
        raise ConfigError(
            "cluster.groups has several kinds of devices, and a dry run is of one; name it in cluster.device"
        )
    composed = compose(rest, config_dir, needs_trainer=True)
    composed.load_plugins()
    settings = check_run(composed.config)
    device = settings.placement.device
    if device == "auto":
        rest = [*rest, "placement.device=cuda"]
        settings = check_run(compose(rest, config_dir, needs_trainer=True).config)
    elif device != "cuda":
        raise ConfigError(f"placement.device is {device}, and a dry run is of CUDA devices; set placement.device=cuda")
    with show_progress("running dry"):
        reports = dry_run_pools(settings, rest, config_dir, cluster, packages)
    if as_json:
        typer.echo(json.dumps({report.pool: report.as_dict() for report in reports}, indent=2))
    else:
        for report in reports:
            print_lines(*_render(report, explain))
    if not all(report.fits and not any(rank.record["faults"] for rank in report.ranks) for report in reports):
        raise typer.Exit(1)


def dry_run_pools(
    settings: RunSettings,
    overrides: Sequence[str],
    config_dir: Path | None,
    cluster: Cluster,
    packages: Path | None = None,
) -> list[PoolReport]:
    """Return the report of each pool that has models.

    Args:
        settings: settings of the run, for CUDA devices.
        overrides, config_dir: arguments that they come from.
        cluster: figures of the devices and links.
        packages: folder with further packages, such as Transformer Engine.
    """
    from rollcast_dryrun.pricing import beside
    from rollcast_dryrun.process import MockProcess
    from rollcast_dryrun.recipe import models_of
    from rollcast_dryrun.report import PoolReport, RankReport

    folder = None if config_dir is None else str(config_dir.resolve())
    kind = asdict(cluster.nodes[0].kind)
    paths = [] if packages is None else [packages.resolve()]
    idle: Queue[MockProcess] = Queue()

    def run(pool: str, rank: int) -> RankReport:
        process = idle.get()
        try:
            return RankReport(rank, process.call(_DRY_RUN, list(overrides), folder, pool, rank, kind))
        finally:
            idle.put(process)

    pools = [pool for name, pool in settings.pools.resource_pool_dict.items() if models_of(settings, name)]
    with ExitStack() as stack:
        for _ in range(min(_PROCESSES, sum(len(_ranks(pool)) for pool in pools))):
            idle.put(stack.enter_context(MockProcess(paths)))
        executor = stack.enter_context(ThreadPoolExecutor(_PROCESSES))
        calls = {pool.name: [executor.submit(run, pool.name, rank) for rank in _ranks(pool)] for pool in pools}
        return [
            PoolReport(
                pool.name,
                [call.result() for call in calls[pool.name]],
                *beside(settings, pool, cluster.nodes[0].kind.memory_bytes),
                cluster,
            )
            for pool in pools
        ]


def _ranks(pool: ResourcePool) -> list[int]:
    """Return the first and the last rank: the largest and the smallest shards, and the ends of a pipeline."""
    return sorted({0, pool.world_size - 1})


def _render(report: PoolReport, explain: bool) -> list[str]:
    from rollcast_automap.memory.memory_facts import format_bytes

    kind, needed = report.node.kind, report.needed()
    lines = [f"{report.pool}: ranks {', '.join(str(rank.rank) for rank in report.ranks)} on {kind.name}"]
    for name, (most, own, rank) in needed.items():
        lines.append(f"  {name}: {format_bytes(most)}, of which the models {format_bytes(own)} (rank {rank})")
        if explain:
            of_rank = next(other for other in report.ranks if other.rank == rank)
            holders = list(of_rank.phases[name]["holders"].items())[:_EXPLAINED]
            lines += [f"    {format_bytes(held)} from {place}" for place, held in holders]
    largest = max(needed, key=lambda name: needed[name][0])
    verdict = "fits" if report.fits else "does not fit"
    lines.append(
        f"  {verdict}: {format_bytes(needed[largest][0])} at most ({largest}), {format_bytes(kind.memory_bytes)} on a "
        "device"
    )
    for rank_report in report.ranks:
        lines += [f"  {line}" for line in _render_rank(report, rank_report)]
    return lines


def _render_rank(report: PoolReport, rank: RankReport) -> list[str]:
    from rollcast_automap.memory.memory_facts import format_bytes

    times = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in report.seconds(rank).items())
    lines = [f"rank {rank.rank}: a step takes at least, without overlap: {times}"]
    lines += [
        f"  {traffic.kind} over {traffic.ranks} ranks ({traffic.link}): {traffic.calls:,} calls, "
        f"{format_bytes(traffic.bytes)} a step"
        for traffic in rank.traffic()
    ]
    waits = [f"{place} {count}x ({name})" for name, places in rank.waits().items() for place, count in places.items()]
    lines.append(f"  waits of the host for each micro-batch: {'; '.join(waits) or 'none'}")
    return lines + [f"  fault: {fault}" for fault in rank.record["faults"]]
