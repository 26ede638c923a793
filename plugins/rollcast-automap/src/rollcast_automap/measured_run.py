"""A run that has been made, as a problem with its mapping and the measured times and memory of its stages."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast.contracts.mapping import Lengths, Mesh, Mode, Placement, Pool, Problem
from rollcast.contracts.mapping import Mapping as RoleMapping
from rollcast.errors import DataError
from rollcast_automap.clusters import ClusterConfig, build_cluster
from rollcast_automap.composition import ahead, find_trained, step_seconds
from rollcast_automap.memory_facts import largest_pass
from rollcast_automap.plan import find_algebra
from rollcast_automap.problem import build_problem, place_of
from rollcast_trainer.batch.sizes import ParallelSizes
from rollcast_trainer.loop import LoopTrainer, build_from_config

if TYPE_CHECKING:
    from rollcast.contracts.pools import ResourcePool

__all__ = ["MeasuredRun", "read_run"]

#: Stage of a problem → the pools' name of it in ``timeline.jsonl``, where it has another.
_CALLS = {"rollout": "generate", "agent_rollout": "generate", "reward_model": "reward"}
_GB = 1e9


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


def read_run(folder: Path, device: str) -> MeasuredRun:
    """Read a run directory.

    Args:
        folder: run directory.
        device: kind of the devices that the run was on.

    Raises:
        DataError: the folder holds no run of two steps or more, or a file cannot be read.
        ConfigError: the run's trainer has no stages that could be priced.
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
    pools = _read_pools(trainer)
    nodes = max(len(pool.process_on_nodes) for pool in pools.values())
    devices = [sum(dict(pool.places).get(node, 0) for pool in pools.values()) for node in range(nodes)]
    response, trained = _lengths(trainer, steps)
    cluster = build_cluster(ClusterConfig(nodes=nodes, devices_per_node=max(devices), device=device))
    problem = build_problem(trainer, cluster, response)
    problem = replace(problem, prompt_lengths=_prompt_lengths(problem, steps), trained_share=trained)
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


def _lengths(trainer: LoopTrainer, steps: Sequence[Mapping[str, Any]]) -> tuple[Lengths | None, float]:
    """Return the lengths of responses, and the share of rows that updates compute."""
    mean, longest = _mean(steps, "rollout/response_length_mean"), trainer.task.data.max_response_length
    without = _mean(steps, "actor/zero_advantage_rows") if trainer.task.actor.skip_zero_advantage else None
    found = None if mean is None else Lengths(min(mean, float(longest)), longest)
    return found, 1.0 - (without or 0.0)


def _prompt_lengths(problem: Problem, steps: Sequence[Mapping[str, Any]]) -> Lengths:
    """Return the lengths of prompts: what is left of all tokens without the responses."""
    tokens, longest = _mean(steps, "perf/total_num_tokens"), problem.prompt_lengths.maximum
    if tokens is None:
        return problem.prompt_lengths
    mean = tokens / problem.rows - problem.response_lengths.mean
    # Prompts of one task are about equally long, unlike responses: the quantiles say so.
    mean = min(max(mean, 1.0), float(longest))
    return Lengths(mean, longest, ((0.0, mean), (1.0, mean)))


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
        placements.append(Placement(role.name, pool.name, mesh, _micro_batch(trainer, problem, role.name)))
    used = {each.pool for each in placements}
    mode: Mode = "standalone" if task.uses_replicas and task.has_own_pool("rollout") else "hybrid"
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


def _micro_batch(trainer: LoopTrainer, problem: Problem, role: str) -> int:
    """Return the rows of a micro-batch of mean length on a rank."""
    algebra, actor = find_algebra(trainer), trainer.task.actor
    if role == "ref":
        own = actor.log_prob_micro_batch_size_per_gpu or actor.ppo_micro_batch_size_per_gpu
    elif role == "actor":
        own = actor.ppo_micro_batch_size_per_gpu
    else:
        section = trainer.task.config[role]
        own = section.get("ppo_micro_batch_size_per_gpu") or section.get("micro_batch_size_per_gpu")
    mean = problem.prompt_lengths.mean + problem.response_lengths.mean
    return largest_pass(replace(algebra, micro_batch_rows=own), max(round(mean), 1))


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
    for key in ("perf/max_memory_allocated_gb", "perf/cpu_memory_used_gb"):
        found = [float(row[key]) for row in steps if key in row]
        if found:
            return round(max(found) * _GB)
    return None
