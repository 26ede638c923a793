"""A run that has been made, as a problem with its mapping and the measured times and memory of its stages."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast.contracts.mapping import Mapping as RoleMapping
from rollcast.contracts.mapping import Mesh, Mode, Placement, Pool, Prediction, Problem
from rollcast.errors import ConfigError, DataError
from rollcast_automap.composition import ahead, find_trained, pool_bytes, step_seconds
from rollcast_automap.costs.clusters import ClusterConfig, build_cluster
from rollcast_automap.costs.run_lengths import read_run_lengths
from rollcast_automap.memory.role_specs import micro_batch_rows
from rollcast_automap.plan import find_algebra
from rollcast_automap.problem import build_problem, place_of
from rollcast_trainer.batch.sizes import ParallelSizes
from rollcast_trainer.loop import LoopTrainer, build_from_config
from rollcast_trainer.stages.update_actor import may_skip_rows

if TYPE_CHECKING:
    from rollcast.contracts.pools import ResourcePool

__all__ = ["MeasuredRun", "read_run", "worker_bytes"]

#: Stage of a problem → the pools' name of it in ``timeline.jsonl``, where it has another.
_CALLS = {"rollout": "generate", "agent_rollout": "generate", "reward_model": "reward"}
_GB = 1e9
_ACCELERATOR_BYTES = "perf/max_memory_allocated_gb"


@dataclass(frozen=True)
class MeasuredRun:
    """What a run was, and what it took.

    Attributes:
        folder: run directory.
        problem: its stages, models and measured token counts.
        mapping: where its roles were.
        stages: stage → median seconds of a step in its pool, ``weight_sync`` among them; only those that were timed.
        step_seconds: median duration of a step.
        peak_bytes: largest memory of a worker on its device, without one of its process; None if it is not recorded.
    """

    folder: Path
    problem: Problem
    mapping: RoleMapping
    stages: Mapping[str, float]
    step_seconds: float
    peak_bytes: int | None

    @property
    def home(self) -> str:
        """Name of the pool of the trained role, whose workers ``peak_bytes`` is of."""
        trained = find_trained(self.problem)
        return next(each.pool for each in self.mapping.placements if trained is None or each.role == trained.name)

    @property
    def busy_seconds(self) -> float:
        """Seconds of a step that its stages account for, by the composition of predictions."""
        homes = {each.role: each.pool for each in self.mapping.placements}
        seconds = {stage.name: self.stages.get(stage.name, 0.0) for stage in self.problem.stages}
        return step_seconds(self.problem, homes, seconds, self.stages.get("weight_sync", 0.0), ahead(self.mapping))


def worker_bytes(run: MeasuredRun, prediction: Prediction) -> int:
    """Return the prediction of ``run.peak_bytes``: the peak of a worker of the trained role on its device.

    Replicas have processes of their own, and torch's allocator on a GPU knows nothing of context and libraries.
    """
    mine = [each.role for each in run.mapping.placements if each.pool == run.home]
    parts = [prediction.memory[role] for role in mine if not prediction.memory[role].own_process]
    on_gpu = all(node.kind.name != "cpu" for node in run.problem.cluster.nodes)
    return pool_bytes([replace(each, reserve=0) if on_gpu else each for each in parts])


def read_run(folder: Path, device: str | None = None) -> MeasuredRun:
    """Read a run directory.

    Args:
        folder: run directory.
        device: kind of the devices that the run was on; a run on CPUs says so itself.

    Raises:
        DataError: the folder holds no run of two steps or more, or a file cannot be read.
        ConfigError: the run's trainer has no stages that could be priced, or the kind of device is not known.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    file = folder / "config.yaml"
    try:
        config: Any = OmegaConf.load(file)
    except (OSError, ValueError, OmegaConfBaseException) as error:
        raise DataError(f"{file} cannot be read, so {folder} is no run directory: {error}") from error
    trainer = build_from_config(config)
    metrics, timeline = (_read_steps(folder / name) for name in ("metrics.jsonl", "timeline.jsonl"))
    steps = [row for row in metrics if "time/step_s" in row]
    if len(steps) < 2:
        raise DataError(f"{folder / 'metrics.jsonl'} has {len(steps)} steps, but the first is not counted; train more")
    if device is None and _ACCELERATOR_BYTES in steps[-1]:
        raise ConfigError(f"{folder} ran on an accelerator; name its kind, such as cluster.device=h100")
    pools = _read_pools(trainer)
    nodes = max(len(pool.process_on_nodes) for pool in pools.values())
    devices = [sum(dict(pool.places).get(node, 0) for pool in pools.values()) for node in range(nodes)]
    data = trainer.task.data
    lengths = read_run_lengths(folder, (data.max_prompt_length, data.max_response_length))
    cluster = build_cluster(ClusterConfig(nodes=nodes, devices_per_node=max(devices), device=device or "cpu"))
    problem = build_problem(trainer, cluster, lengths.response, prompt=lengths.prompt)
    problem = replace(problem, trained_share=_trained_share(trainer, steps))
    mapping = _read_mapping(trainer, problem, pools)
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


def _trained_share(trainer: LoopTrainer, steps: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of rows that updates compute."""
    without = _mean(steps, "actor/zero_advantage_rows") if may_skip_rows(trainer.run) else None
    return 1.0 - (without or 0.0)


def _read_pools(trainer: LoopTrainer) -> dict[str, Pool]:
    """Return the pools of a run beside each other, each from the first node on."""
    found: dict[str, ResourcePool] = trainer.task.pools.resource_pool_dict
    return {name: Pool(name, tuple(enumerate(pool.process_on_nodes))) for name, pool in found.items()}


def _read_mapping(trainer: LoopTrainer, problem: Problem, pools: Mapping[str, Pool]) -> RoleMapping:
    task = trainer.task
    placements = []
    for role in problem.roles:
        pool = pools[task.pools.mapping[place_of(role.name, task.uses_replicas)]]
        if role.kind == "generates":
            sizes = ParallelSizes(task.rollout.tensor_model_parallel_size)
            # A rollout in the actor's processes has one copy a data-parallel part.
            sizes = sizes if task.uses_replicas else ParallelSizes.read(task.engine)
            placements.append(
                Placement(role.name, pool.name, Mesh(sizes.data(pool.devices), sizes.model), _slots(task))
            )
            continue
        sizes = ParallelSizes.read(task.role_engine(role.name))
        mesh = Mesh(sizes.data(pool.devices), sizes.tensor, sizes.pipeline)
        length = max(round(problem.prompt_lengths.mean + problem.response_lengths.mean), 1)
        rows = micro_batch_rows(trainer, find_algebra(trainer), role.name, pool.devices, length)
        placements.append(Placement(role.name, pool.name, mesh, rows))
    used = {each.pool for each in placements}
    mode: Mode = "hybrid"
    if task.uses_replicas:
        mode = "standalone" if task.has_own_pool("rollout") else task.rollout.mode
    return RoleMapping(
        pools=tuple(pool for name, pool in pools.items() if name in used),
        placements=tuple(placements),
        mode=mode,
        max_staleness=int(getattr(task.trainer, "max_staleness", 0)),
    )


def _slots(task: Any) -> int:
    """Return the sequences that a replica decodes at once, by the rollout's own key."""
    rollout = task.rollout
    rows = getattr(rollout, "max_num_seqs", None) or getattr(rollout, "max_batch_size", None)
    return int(rows or task.data.train_batch_size * rollout.n)


def _seconds_of(line: Mapping[str, Any], problem: Problem) -> dict[str, float]:
    """Return the seconds of each stage in a line of the timeline; the longest of the pools that took part."""
    calls = {**{stage.name: _CALLS.get(stage.name, stage.name) for stage in problem.stages}}
    calls["weight_sync"] = "update_weights"
    found: dict[str, float] = {}
    for stage, call in calls.items():
        spans = [pool["calls"][call] for pool in line["pools"].values() if call in pool["calls"]]
        if spans:
            found[stage] = max(sum(end - start for start, end in each) for each in spans)
    return found


def _peak(steps: Sequence[Mapping[str, Any]]) -> int | None:
    for key in (_ACCELERATOR_BYTES, "perf/cpu_memory_used_gb"):
        found = [float(row[key]) for row in steps if key in row]
        if found:
            return round(max(found) * _GB)
    return None
