"""Conversion of a run's configuration to a mapping problem, and of a mapping back to overrides."""

from __future__ import annotations

import json
from collections.abc import Mapping as MappingType
from typing import get_args

from rollcast.contracts.engine import EngineCapabilities, engines
from rollcast.contracts.rollout import RolloutMode
from rollcast.errors import ConfigError
from rollcast_automap.contract import (
    Cluster,
    Constraints,
    Lengths,
    Mapping,
    Mesh,
    Mode,
    Placement,
    Pool,
    Problem,
    RoleSpec,
    StageKind,
    StageSpec,
)
from rollcast_automap.costs.device_kinds import ACCELERATOR_TYPES
from rollcast_automap.memory.memory_model import measure_model
from rollcast_automap.memory.role_specs import find_model, read_role, role_size, shares_weights
from rollcast_automap.search.constraints import ConstraintsConfig, check_roles
from rollcast_trainer.api import Role, RunSettings

__all__ = ["build_problem", "list_overrides", "place_of"]

#: Stage of a step → role and kind. The check of log-probs is not priced, because it computes only a few rows.
_PRICED: dict[str, tuple[str, StageKind]] = {
    "rollout": ("rollout", "generate"),
    "agent_rollout": ("rollout", "generate"),
    "old_log_prob": ("actor", "forward"),
    "ref_log_prob": ("ref", "forward"),
    "values": ("critic", "forward"),
    "reward_model": ("reward_model", "forward"),
    "update_critic": ("critic", "update"),
    "update_actor": ("actor", "update"),
}
#: Role of a problem → its name in ``placement.mapping``.
_PLACED = {"actor": str(Role.ACTOR_ROLLOUT)}
#: Role of a problem → key of its micro-batch.
_MICRO_BATCHES = {
    "actor": "actor.ppo_micro_batch_size_per_gpu",
    "ref": "actor.log_prob_micro_batch_size_per_gpu",
    "critic": "critic.ppo_micro_batch_size_per_gpu",
    "reward_model": "reward_model.micro_batch_size_per_gpu",
}


def build_problem(
    settings: RunSettings,
    cluster: Cluster,
    response: Lengths | float | None = None,
    max_staleness: int = 0,
    limits: ConstraintsConfig | None = None,
    prompt: Lengths | None = None,
) -> Problem:
    """Return the mapping problem of a run.

    Args:
        settings: settings of the run.
        cluster: devices to map onto.
        response: statistics of the response lengths, or their mean in tokens; None for half of the longest.
        max_staleness: largest value that the planner may choose.
        limits: constraints from the user.
        prompt: statistics of the prompt lengths; None for a mean of half of the longest.

    Raises:
        ConfigError: the model folder cannot be used, a stage calls workers without a known cost, or a constraint names
            a role that the run does not have.
    """
    data, algebra = settings.data, settings.algebra
    stages = _stages(settings)
    names = list(dict.fromkeys(stage.role for stage in stages))
    limits = limits or ConstraintsConfig()
    check_roles(limits, names, cluster.devices)
    roles = tuple(_role(settings, name, cluster) for name in names)
    meshes = {role.name: _meshes(settings, role, cluster) for role in roles}
    longest = data.max_response_length
    modes = settings.rollout_class.capabilities.modes
    together: tuple[tuple[str, str], ...] = (("actor", "ref"),) if "ref" in names and shares_weights(settings) else ()
    return Problem(
        roles=roles,
        stages=stages,
        prompts=algebra.prompts,
        samples=algebra.samples,
        mini_batches=algebra.mini_batches,
        epochs=algebra.epochs,
        prompt_lengths=prompt or Lengths(data.max_prompt_length / 2, data.max_prompt_length),
        response_lengths=response
        if isinstance(response, Lengths)
        else Lengths(min(response or longest / 2, float(longest)), longest),
        cluster=cluster,
        constraints=Constraints(
            pinned=limits.pinned,
            forbidden=tuple((one, other) for one, other in limits.apart),
            together=together + tuple((one, other) for one, other in limits.together),
            headroom=limits.headroom,
            max_staleness=max_staleness,
            meshes={name: mesh for name, mesh in meshes.items() if mesh is not None},
            modes=tuple(mode for mode in get_args(Mode) if RolloutMode(mode) in modes),
        ),
    )


def _stages(settings: RunSettings) -> tuple[StageSpec, ...]:
    """Return the stages that run a model, in the order in which the trainer starts them.

    As in the trainer's loop, a stage is a call in flight: it waits for the stages whose columns it reads. A stage of
    the driver reads its columns before any later stage starts.
    """
    ordered: list[StageSpec] = []
    #: Column → priced stages that it comes from.
    sources: dict[str, frozenset[str]] = {}
    read: frozenset[str] = frozenset()
    for place in settings.places:
        reads = place.spec.reads if place.name not in _PRICED else (*place.spec.reads, *place.spec.optional)
        waits_for = read.union(*(names for column in reads for names in _of_column(sources, column)))
        if place.name in _PRICED:
            role, kind = _PRICED[place.name]
            waits = tuple(stage.name for stage in ordered if stage.name in waits_for)
            ordered.append(StageSpec(place.name, role, kind, waits))
            waits_for = frozenset({place.name})
            read = waits_for if kind == "generate" else read
        elif not place.spec.roles:
            read = waits_for
        elif place.name not in ("log_prob_check", "reward_baselines"):
            raise ConfigError(
                f"stage {place.name} calls the roles {', '.join(place.spec.roles)}, but rollcast map has no cost for it"
            )
        sources |= dict.fromkeys(place.spec.writes, waits_for)
    if not any(stage.kind == "generate" for stage in ordered):
        raise ConfigError(f"trainer.name={settings.trainer.name} generates nothing; map a trainer such as ppo")
    return tuple(ordered)


def _of_column(sources: MappingType[str, frozenset[str]], column: str) -> list[frozenset[str]]:
    """Return the priced stages behind each writer of a column; a written name that ends with ``/`` is a prefix."""
    return [
        stages for name, stages in sources.items() if name == column or (name.endswith("/") and column.startswith(name))
    ]


def _role(settings: RunSettings, name: str, cluster: Cluster) -> RoleSpec:
    model, reason = find_model(settings)
    if model is None:
        raise ConfigError(f"the size of the model is not known yet: {reason}")
    on_cpu = all(node.kind.name == "cpu" for node in cluster.nodes)
    return read_role(settings, name, role_size(settings, name, measure_model(model)), on_cpu)


def _meshes(settings: RunSettings, role: RoleSpec, cluster: Cluster) -> tuple[Mesh, ...] | None:
    """Return the meshes that a role's engine or rollout supports; None for any."""
    sizes = range(1, cluster.devices + 1)
    if role.kind == "generates":
        alone = not settings.rollout_class.capabilities.tensor_parallel
        return tuple(Mesh(data=size) for size in sizes) if alone else None
    has: EngineCapabilities = engines.get(role.plugin).capabilities
    if has.tensor_parallel and has.pipeline_parallel:
        return None
    most = has.max_world_size or cluster.devices
    return tuple(Mesh(data=size) for size in sizes if size <= most)


#: Sizes of a replica that are 1 in every mapping.
_SEARCHED_AS_ONE = ("pipeline_model_parallel_size", "data_parallel_size", "expert_parallel_size")


def place_of(role: str, uses_replicas: bool) -> str:
    """Return the key of ``placement.mapping`` that places a role of a problem."""
    return str(Role.ACTOR_ROLLOUT) if role == "rollout" and not uses_replicas else _PLACED.get(role, role)


def list_overrides(settings: RunSettings, problem: Problem, mapping: Mapping) -> list[str]:
    """Return the overrides that apply a mapping to a run."""
    pools = {pool.name: pool for pool in mapping.pools}
    places = {entry.role: entry for entry in mapping.placements}
    home = places["actor"].pool
    overrides = _pool_overrides(problem.cluster, pools, {role: entry.pool for role, entry in places.items()}, home)
    for role, placement in places.items():
        overrides += _role_overrides(problem.role(role), placement)
    overrides += _rollout_overrides(settings, places["rollout"], mapping, pools)
    return [*overrides, f"trainer.max_staleness={mapping.max_staleness}"]


def _pool_overrides(cluster: Cluster, pools: dict[str, Pool], homes: dict[str, str], home: str) -> list[str]:
    counts = pools[home].process_on_nodes
    mixed = len({node.kind.name for node in cluster.nodes}) > 1
    overrides, mapped = [], {_PLACED.get(role, role): name for role, name in homes.items() if name != home}
    # placement.nnodes cannot ask for an accelerator_type, so clusters of several kinds use named pools only.
    if len(set(counts)) == 1 and not mixed:
        overrides = [f"placement.nnodes={len(counts)}", f"placement.n_gpus_per_node={counts[0]}"]
    else:
        mapped |= {_PLACED.get(role, role): name for role, name in homes.items() if name == home}
    used = dict.fromkeys(mapped.values())
    overrides += [f"placement.pools.{name}={_describe_pool(cluster, pools[name], mixed)}" for name in used]
    return overrides + [f"placement.mapping.{role}={name}" for role, name in mapped.items()]


def _describe_pool(cluster: Cluster, pool: Pool, mixed: bool) -> str:
    """Return the value of ``placement.pools.NAME``; in a mixed cluster, a pool on one kind of node asks for it."""
    processes = json.dumps(list(pool.process_on_nodes))
    kinds = {cluster.nodes[node].kind.name.partition("#")[0] for node, _ in pool.places}
    accelerator = ACCELERATOR_TYPES.get(next(iter(kinds))) if mixed and len(kinds) == 1 else None
    return processes if accelerator is None else f"{{processes: {processes}, accelerator_type: {accelerator}}}"


def _role_overrides(role: RoleSpec, placement: Placement) -> list[str]:
    if role.kind == "generates":
        return [f"rollout.tensor_model_parallel_size={placement.mesh.tensor}"]
    overrides = [f"{_MICRO_BATCHES[role.name]}={placement.micro_batch_rows}"]
    has: EngineCapabilities = engines.get(role.plugin).capabilities
    if has.tensor_parallel:
        overrides.append(f"{role.name}.engine.tensor_model_parallel_size={placement.mesh.tensor}")
    if has.pipeline_parallel:
        overrides.append(f"{role.name}.engine.pipeline_model_parallel_size={placement.mesh.pipeline}")
    return overrides


def _rollout_overrides(
    settings: RunSettings, placement: Placement, mapping: Mapping, pools: dict[str, Pool]
) -> list[str]:
    """Return the overrides for the rollout mode and for a weight sync that supports it."""
    mode = mapping.mode
    homes = {entry.pool for entry in mapping.placements if entry.role in ("actor", "rollout")}
    nodes = {node for home in homes for node, _ in pools[home].places}
    sync = settings.rollout.weight_sync
    if not settings.uses_replicas and (mode != "hybrid" or placement.mesh.tensor > 1):
        sync = "shared_memory"
    if mode == "standalone" and sync in ("shared_memory", "cuda_ipc") and len(nodes) > 1:
        sync = "collective"
    # The search gives replicas one stage and one copy.
    ones = [f"rollout.{key}=1" for key in _SEARCHED_AS_ONE if getattr(settings.rollout, key) > 1]
    return [f"rollout.mode={mode}", f"rollout.weight_sync={sync}", *ones]
