"""From a run's configuration to a problem of mapping, and from a mapping back to configuration."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import get_args

from rollcast.contracts.engine import EngineCapabilities, engines
from rollcast.contracts.mapping import (
    Cluster,
    Constraints,
    Lengths,
    Mapping,
    Mesh,
    Mode,
    ModelFacts,
    Placement,
    Pool,
    Problem,
    RoleKind,
    RoleSpec,
    StageKind,
    StageSpec,
)
from rollcast.contracts.rollout import RolloutMode
from rollcast.errors import ConfigError
from rollcast_automap.constraints import ConstraintsConfig, check_roles
from rollcast_automap.engine_layout import EngineLayout
from rollcast_automap.memory_facts import critic_size, find_model
from rollcast_automap.memory_model import ModelSize, measure_model
from rollcast_automap.plan import find_algebra
from rollcast_trainer.loop import LoopTrainer
from rollcast_trainer.schemas import RewardModelConfig
from rollcast_trainer.workers.roles import Role

__all__ = ["build_problem", "list_overrides", "place_of"]

#: Stage of a step → role and kind. The check of log-probs computes a few rows, and is not priced.
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
    trainer: LoopTrainer,
    cluster: Cluster,
    response: Lengths | float | None = None,
    max_staleness: int = 0,
    limits: ConstraintsConfig | None = None,
) -> Problem:
    """Return the problem of mapping a run.

    Args:
        trainer: built, not started.
        cluster: devices.
        response: statistics of the responses, or their mean in tokens; None for half of the longest. The mean of a
            prompt is half of its longest.
        max_staleness: largest value that the planner may choose.
        limits: limits of the user's.

    Raises:
        ConfigError: the model folder cannot be used, a stage calls workers that no cost is known of, or a limit names
            a role that the run has not.
    """
    task, data, algebra = trainer.task, trainer.task.data, find_algebra(trainer)
    stages = _stages(trainer)
    names = list(dict.fromkeys(stage.role for stage in stages))
    limits = limits or ConstraintsConfig()
    check_roles(limits, names, cluster.devices)
    roles = tuple(_role(trainer, name) for name in names)
    meshes = {role.name: _meshes(trainer, role, cluster) for role in roles}
    longest = data.max_response_length
    modes = task.rollout_class.capabilities.modes
    return Problem(
        roles=roles,
        stages=stages,
        prompts=algebra.prompts,
        samples=algebra.samples,
        mini_batches=algebra.mini_batches,
        epochs=algebra.epochs,
        prompt_lengths=Lengths(data.max_prompt_length / 2, data.max_prompt_length),
        response_lengths=response
        if isinstance(response, Lengths)
        else Lengths(min(response or longest / 2, float(longest)), longest),
        cluster=cluster,
        constraints=Constraints(
            pinned=limits.pinned,
            forbidden=tuple((one, other) for one, other in limits.apart),
            together=tuple((one, other) for one, other in limits.together),
            headroom=limits.headroom,
            max_staleness=max_staleness,
            meshes={name: found for name, found in meshes.items() if found is not None},
            modes=tuple(mode for mode in get_args(Mode) if RolloutMode(mode) in modes),
        ),
    )


def _stages(trainer: LoopTrainer) -> tuple[StageSpec, ...]:
    """Return the stages that models compute: generation, then what reads the responses, then updates."""
    found: dict[StageKind, list[StageSpec]] = {"generate": [], "forward": [], "update": []}
    for place in trainer.places:
        if place.name in _PRICED:
            role, kind = _PRICED[place.name]
            found[kind].append(StageSpec(place.name, role, kind))
        elif place.spec.roles and place.name not in ("log_prob_check", "reward_baselines"):
            raise ConfigError(
                f"stage {place.name} calls the roles {', '.join(place.spec.roles)}, and rollcast map has no cost of it"
            )
    if not found["generate"]:
        raise ConfigError(f"trainer.name={trainer.task.trainer.name} generates nothing; map a trainer such as ppo")
    before: tuple[str, ...] = ()
    ordered: list[StageSpec] = []
    for kind in ("generate", "forward", "update"):
        ordered += [replace(stage, waits_for=before) for stage in found[kind]]
        before = (*before, *(stage.name for stage in found[kind]))
    return tuple(ordered)


def _role(trainer: LoopTrainer, name: str) -> RoleSpec:
    task = trainer.task
    kinds: dict[str, RoleKind] = {"actor": "trains", "critic": "trains", "rollout": "generates"}
    facts = _facts(_size(trainer, name))
    if name == "rollout":
        return RoleSpec(name, "generates", facts, task.rollout.name, own_process=task.uses_replicas)
    engine = task.role_engine(name)
    layout = EngineLayout.read(engine, 1)
    return RoleSpec(
        name,
        kinds.get(name, "forwards"),
        replace(facts, dtype_bytes=layout.stored),
        engine.name,
        optimizer_bytes=2 * layout.stored if layout.state is None else layout.state,
        gradient_bytes=layout.stored if layout.gradient is None else layout.gradient,
        offload=layout.param_offload,
        recompute=layout.checkpointing,
        value_head=name in ("critic", "reward_model"),
    )


def _size(trainer: LoopTrainer, name: str) -> ModelSize:
    model, reason = find_model(trainer)
    if model is None:
        raise ConfigError(f"the size of the model is not known yet: {reason}")
    size = measure_model(model)
    if name == "critic":
        return critic_size(trainer, size)
    if name == "reward_model":
        section: RewardModelConfig = trainer.task.section("reward_model", RewardModelConfig)
        return measure_model(replace(model, path=str(section.model.path)), "reward_model.model.path")
    return size


def _facts(size: ModelSize) -> ModelFacts:
    return ModelFacts(
        layers=size.layers,
        hidden=size.hidden,
        heads=size.heads,
        kv_heads=size.kv_heads,
        ffn=size.intermediate,
        vocab=size.vocabulary,
        parameters=size.parameters,
        head_size=size.head_dim,
        tied=size.parameters == size.body,
    )


def _meshes(trainer: LoopTrainer, role: RoleSpec, cluster: Cluster) -> tuple[Mesh, ...] | None:
    """Return the meshes that a role's engine or rollout can have; None for any."""
    sizes = range(1, cluster.devices + 1)
    if role.kind == "generates":
        alone = not trainer.task.rollout_class.capabilities.tensor_parallel
        return tuple(Mesh(data=size) for size in sizes) if alone else None
    has: EngineCapabilities = engines.get(role.plugin).capabilities
    if has.tensor_parallel and has.pipeline_parallel:
        return None
    most = has.max_world_size or cluster.devices
    return tuple(Mesh(data=size) for size in sizes if size <= most)


def place_of(role: str, uses_replicas: bool) -> str:
    """Return the name in ``placement.mapping`` that decides where a role of a problem is."""
    return str(Role.ACTOR_ROLLOUT) if role == "rollout" and not uses_replicas else _PLACED.get(role, role)


def list_overrides(trainer: LoopTrainer, problem: Problem, mapping: Mapping) -> list[str]:
    """Return the overrides by which a run takes a mapping."""
    pools = {pool.name: pool for pool in mapping.pools}
    places = {each.role: each for each in mapping.placements}
    home = places["actor"].pool
    found = _pool_overrides(pools, {role: each.pool for role, each in places.items()}, home)
    for role, placement in places.items():
        found += _role_overrides(problem.role(role), placement)
    found += _rollout_overrides(trainer, places["rollout"], mapping, pools)
    return [*found, f"trainer.max_staleness={mapping.max_staleness}"]


def _pool_overrides(pools: dict[str, Pool], homes: dict[str, str], home: str) -> list[str]:
    counts = pools[home].process_on_nodes
    found, mapped = [], {_PLACED.get(role, role): name for role, name in homes.items() if name != home}
    if len(set(counts)) == 1:
        found = [f"placement.nnodes={len(counts)}", f"placement.n_gpus_per_node={counts[0]}"]
    else:
        mapped |= {_PLACED.get(role, role): name for role, name in homes.items() if name == home}
    used = dict.fromkeys(mapped.values())
    found += [f"placement.pools.{name}={json.dumps(list(pools[name].process_on_nodes))}" for name in used]
    return found + [f"placement.mapping.{role}={name}" for role, name in mapped.items()]


def _role_overrides(role: RoleSpec, placement: Placement) -> list[str]:
    if role.kind == "generates":
        return [f"rollout.tensor_model_parallel_size={placement.mesh.tensor}"]
    found = [f"{_MICRO_BATCHES[role.name]}={placement.micro_batch_rows}"]
    has: EngineCapabilities = engines.get(role.plugin).capabilities
    if has.tensor_parallel:
        found.append(f"{role.name}.engine.tensor_model_parallel_size={placement.mesh.tensor}")
    if has.pipeline_parallel:
        found.append(f"{role.name}.engine.pipeline_model_parallel_size={placement.mesh.pipeline}")
    return found


def _rollout_overrides(
    trainer: LoopTrainer, placement: Placement, mapping: Mapping, pools: dict[str, Pool]
) -> list[str]:
    """Return the mode, and a weight sync that can serve it."""
    mode, task = mapping.mode, trainer.task
    homes = {each.pool for each in mapping.placements if each.role in ("actor", "rollout")}
    nodes = {node for home in homes for node, _ in pools[home].places}
    sync = task.rollout.weight_sync
    if not task.uses_replicas and (mode != "hybrid" or placement.mesh.tensor > 1):
        sync = "shared_memory"
    if mode == "standalone" and sync in ("shared_memory", "cuda_ipc") and len(nodes) > 1:
        sync = "collective"
    return [f"rollout.mode={mode}", f"rollout.weight_sync={sync}"]
