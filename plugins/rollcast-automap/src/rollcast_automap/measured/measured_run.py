"""A finished run as a mapping problem, its mapping, and the measured times and memory of its stages."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast.errors import ConfigError, DataError
from rollcast_automap.composition import ahead, find_trained, pool_bytes, step_seconds
from rollcast_automap.contract import Mapping as RoleMapping
from rollcast_automap.contract import Mesh, Mode, Placement, Pool, Prediction, Problem
from rollcast_automap.costs.clusters import ClusterConfig, build_cluster
from rollcast_automap.costs.run_lengths import read_run_lengths
from rollcast_automap.memory.memory_facts import rollout_mesh
from rollcast_automap.memory.role_specs import micro_batch_rows
from rollcast_automap.problem import build_problem, place_of
from rollcast_trainer.api import ParallelSizes, RunSettings, check_run, may_skip_rows

if TYPE_CHECKING:
    from rollcast.contracts.pools import ResourcePool

__all__ = ["MeasuredRun", "read_run", "worker_bytes"]

#: Stage of a problem → its name in ``timeline.jsonl``, if that differs.
_CALLS = {"rollout": "generate", "agent_rollout": "generate", "reward_model": "reward"}
_GB = 1e9
_ACCELERATOR_BYTES = "perf/max_memory_allocated_gb"


@dataclass(frozen=True)
class MeasuredRun:
    """A finished run with its measured figures.

    Attributes:
        folder: run directory.
        problem: stages, models and measured token counts of the run.
        mapping: placement of the roles.
        stages: stage → median seconds per step in its pool, including ``weight_sync``; only stages that were timed.
        step_seconds: median duration of a step in seconds.
        peak_bytes: peak memory of a worker on its accelerator, or of its process if there is none; None if not
            recorded.
    """

    folder: Path
    problem: Problem
    mapping: RoleMapping
    stages: Mapping[str, float]
    step_seconds: float
    peak_bytes: int | None

    @property
    def home(self) -> str:
        """Name of the pool of the trained role; ``peak_bytes`` is the memory of its workers."""
        trained = find_trained(self.problem)
        return next(
            placement.pool for placement in self.mapping.placements if trained is None or placement.role == trained.name
        )

    @property
    def busy_seconds(self) -> float:
        """Seconds of a step that its stages explain, composed in the same way as a prediction."""
        homes = {placement.role: placement.pool for placement in self.mapping.placements}
        seconds = {stage.name: self.stages.get(stage.name, 0.0) for stage in self.problem.stages}
        return step_seconds(self.problem, homes, seconds, self.stages.get("weight_sync", 0.0), ahead(self.mapping))


def worker_bytes(run: MeasuredRun, prediction: Prediction) -> int:
    """Return the predicted peak of a worker of the trained role, to compare with ``run.peak_bytes``.

    Replicas are left out, because they have processes of their own. On a GPU the reserve is left out too, because
    torch's allocator does not count context and libraries.
    """
    mine = [placement.role for placement in run.mapping.placements if placement.pool == run.home]
    parts = [prediction.memory[role] for role in mine if not prediction.memory[role].own_process]
    on_gpu = all(node.kind.name != "cpu" for node in run.problem.cluster.nodes)
    return pool_bytes([replace(part, reserve=0) if on_gpu else part for part in parts])


def read_run(folder: Path, device: str | None = None) -> MeasuredRun:
    """Read a run directory.

    Args:
        folder: run directory.
        device: kind of the run's devices; not needed for a run on CPUs, which is recognized.

    Raises:
        DataError: the folder holds no run of at least two steps, or a file cannot be read.
        ConfigError: the run's trainer has no stages that can be priced, or the kind of device is not known.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    file = folder / "config.yaml"
    try:
        config: Any = OmegaConf.load(file)
    except (OSError, ValueError, OmegaConfBaseException) as error:
        raise DataError(f"{file} cannot be read, so {folder} is no run directory: {error}") from error
    settings = check_run(config)
    metrics, timeline = (_read_steps(folder / name) for name in ("metrics.jsonl", "timeline.jsonl"))
    steps = [row for row in metrics if "time/step_s" in row]
    if len(steps) < 2:
        raise DataError(f"{folder / 'metrics.jsonl'} has {len(steps)} steps, but the first is not counted; train more")
    if device is None and _ACCELERATOR_BYTES in steps[-1]:
        raise ConfigError(f"{folder} ran on an accelerator; name its kind, such as cluster.device=h100")
    pools = _read_pools(settings)
    nodes = max(len(pool.process_on_nodes) for pool in pools.values())
    devices = [sum(dict(pool.places).get(node, 0) for pool in pools.values()) for node in range(nodes)]
    data = settings.data
    lengths = read_run_lengths(folder, (data.max_prompt_length, data.max_response_length))
    cluster = build_cluster(ClusterConfig(nodes=nodes, devices_per_node=max(devices), device=device or "cpu"))
    problem = build_problem(settings, cluster, lengths.response, prompt=lengths.prompt)
    problem = replace(problem, trained_share=_trained_share(settings, steps))
    mapping = _read_mapping(settings, problem, pools)
    timed = [_seconds_of(line, problem) for line in timeline if line["step"] > steps[0]["step"]]
    names = dict.fromkeys(name for line in timed for name in line)
    return MeasuredRun(
        folder=folder,
        problem=problem,
        mapping=mapping,
        stages={name: statistics.median(line[name] for line in timed if name in line) for name in names},
        step_seconds=statistics.median(row["time/step_s"] for row in steps[1:]),
        peak_bytes=_peak(steps),
    )


def _read_steps(path: Path) -> list[dict[str, Any]]:
    try:
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}; the tracker jsonl and the report hook write it") from error
    return [line for line in lines if isinstance(line, dict) and isinstance(line.get("step"), int) and line["step"] > 0]


def _mean(steps: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [row[key] for row in steps if key in row]
    return statistics.fmean(values) if values else None


def _trained_share(settings: RunSettings, steps: Sequence[Mapping[str, Any]]) -> float:
    """Return the fraction of rows that updates train on; rows without an advantage may be skipped."""
    without = _mean(steps, "actor/zero_advantage_rows") if may_skip_rows(settings) else None
    return 1.0 - (without or 0.0)


def _read_pools(settings: RunSettings) -> dict[str, Pool]:
    """Return the pools of a run; each is assumed to start at the first node."""
    pools: dict[str, ResourcePool] = settings.pools.resource_pool_dict
    return {name: Pool(name, tuple(enumerate(pool.process_on_nodes))) for name, pool in pools.items()}


def _read_mapping(settings: RunSettings, problem: Problem, pools: Mapping[str, Pool]) -> RoleMapping:
    placements = []
    for role in problem.roles:
        pool = pools[settings.pools.mapping[place_of(role.name, settings.uses_replicas)]]
        if role.kind == "generates":
            mesh = rollout_mesh(settings, pool.devices)
            placements.append(Placement(role.name, pool.name, mesh, _slots(settings)))
            continue
        sizes = ParallelSizes.read(settings.role_engine(role.name))
        mesh = Mesh(sizes.data(pool.devices), sizes.tensor, sizes.pipeline)
        length = max(round(problem.prompt_lengths.mean + problem.response_lengths.mean), 1)
        rows = micro_batch_rows(settings, settings.algebra, role.name, pool.devices, length)
        placements.append(Placement(role.name, pool.name, mesh, rows))
    used = {placement.pool for placement in placements}
    mode: Mode = "hybrid"
    if settings.uses_replicas:
        mode = "standalone" if settings.has_own_pool("rollout") else settings.rollout.mode
    return RoleMapping(
        pools=tuple(pool for name, pool in pools.items() if name in used),
        placements=tuple(placements),
        mode=mode,
        max_staleness=int(getattr(settings.trainer, "max_staleness", 0)),
    )


def _slots(settings: RunSettings) -> int:
    """Return the sequences that a replica decodes at once: the rollout's own limit, else all rows of a step."""
    rollout = settings.rollout
    rows = getattr(rollout, "max_num_seqs", None) or getattr(rollout, "max_batch_size", None)
    return int(rows or settings.data.train_batch_size * rollout.n)


def _seconds_of(line: Mapping[str, Any], problem: Problem) -> dict[str, float]:
    """Return the seconds of each stage in a line of the timeline; if several pools took part, the longest time."""
    calls = {**{stage.name: _CALLS.get(stage.name, stage.name) for stage in problem.stages}}
    calls["weight_sync"] = "update_weights"
    seconds: dict[str, float] = {}
    for stage, call in calls.items():
        spans = [pool["calls"][call] for pool in line["pools"].values() if call in pool["calls"]]
        if spans:
            seconds[stage] = max(sum(end - start for start, end in span) for span in spans)
    return seconds


def _peak(steps: Sequence[Mapping[str, Any]]) -> int | None:
    for key in (_ACCELERATOR_BYTES, "perf/cpu_memory_used_gb"):
        values = [float(row[key]) for row in steps if key in row]
        if values:
            return round(max(values) * _GB)
    return None
