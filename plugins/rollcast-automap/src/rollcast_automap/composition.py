"""The time and memory of a mapping, composed of the prices of its stages; every planner uses this composition."""

from __future__ import annotations

from collections.abc import Mapping as MappingType
from collections.abc import Sequence

from rollcast.contracts.mapping import (
    BaseCostModel,
    Mapping,
    MemoryParts,
    Mode,
    Placement,
    Pool,
    Prediction,
    Problem,
    RoleSpec,
    StageCost,
    StageSpec,
)

__all__ = [
    "ahead",
    "busy_shares",
    "find_generator",
    "find_trained",
    "fits_pool",
    "held_bytes",
    "makespan",
    "mode_of",
    "pool_bytes",
    "predict",
    "stage_times",
    "step_seconds",
]


def find_generator(problem: Problem) -> RoleSpec | None:
    """Return the role that generates; None if none does."""
    return next((role for role in problem.roles if role.kind == "generates"), None)


def find_trained(problem: Problem) -> RoleSpec | None:
    """Return the role whose weights the rollout takes: ``actor``, else the first that trains."""
    trained = [role for role in problem.roles if role.kind == "trains"]
    return next((role for role in trained if role.name == "actor"), trained[0] if trained else None)


def mode_of(problem: Problem, pool_of: MappingType[str, str]) -> Mode | None:
    """Return the mode that follows from the pools of the roles.

    Returns None if the rollout shares devices with other roles but not with the one that it takes its weights from.
    """
    generator, trained = find_generator(problem), find_trained(problem)
    if generator is None or trained is None:
        return "hybrid"
    home = pool_of[generator.name]
    if home == pool_of[trained.name]:
        return "hybrid"
    alone = sum(pool == home for pool in pool_of.values()) == 1
    return "standalone" if alone else None


def ahead(mapping: Mapping) -> int:
    """Return the steps by which generation runs ahead of training; 0 if they take turns."""
    return mapping.max_staleness if mapping.mode == "standalone" else 0


def makespan(problem: Problem, pool_of: MappingType[str, str], seconds: MappingType[str, float]) -> float:
    """Return the end of the last stage in seconds.

    A stage starts after those that it waits for and after the earlier stages of its pool, so times add up within a
    pool, and across pools the longest counts.
    """
    ends: dict[str, float] = {}
    free: dict[str, float] = {}
    for stage in problem.stages:
        pool = pool_of[stage.role]
        start = max([free.get(pool, 0.0), *(ends[name] for name in stage.waits_for)])
        free[pool] = ends[stage.name] = start + seconds[stage.name]
    return max(ends.values(), default=0.0)


def stage_times(stage: StageSpec, cost: StageCost, switch: float = 0.0) -> dict[str, float]:
    """Return the times of a stage by which :func:`step_seconds` goes: name of a time → seconds.

    Generation has a second one beside its duration: without the tail, which rows of later steps fill if it runs ahead.

    Args:
        stage: the stage.
        cost: its cost.
        switch: seconds of loading and offloading its role, for the first stage of the role in a step; its pool alone
            waits for that.
    """
    times = {stage.name: cost.seconds + switch}
    if stage.kind == "generate":
        times[_filled(stage)] = cost.seconds - cost.tail + switch
    return times


def _filled(stage: StageSpec) -> str:
    return f"{stage.name} without its tail"


def step_seconds(
    problem: Problem,
    pool_of: MappingType[str, str],
    seconds: MappingType[str, float],
    sync: float,
    staleness: int,
    controller: float = 0.0,
) -> float:
    """Return the duration of a step.

    Where generation runs ``s`` steps ahead, three limits are possible, and the slowest counts. Training takes its time.
    Replicas have to generate a step's rows in a step; their slots are full, as rows of later steps fill the tail. And
    the rows of a step start when the weights of ``s + 1`` steps before have been sent, so that their generation and
    training take no longer than ``s + 1`` steps.

    Args:
        problem: the problem.
        pool_of: role → name of its pool.
        seconds: times of the stages, as :func:`stage_times` returns them.
        sync: seconds of the weight sync, during which neither side computes.
        staleness: steps by which generation runs ahead of training; 0 if they take turns.
        controller: seconds of the controller in a step, for which training waits, and generation that runs ahead not.
    """
    if not staleness:
        return makespan(problem, pool_of, seconds) + controller + sync
    generating = [stage for stage in problem.stages if stage.kind == "generate"]
    generation = sum(seconds[stage.name] for stage in generating)
    filled = sum(seconds.get(_filled(stage), seconds[stage.name]) for stage in generating)
    others = {stage.name: 0.0 if stage.kind == "generate" else seconds[stage.name] for stage in problem.stages}
    training = makespan(problem, pool_of, others) + controller
    return max(training, filled, (generation + training) / (staleness + 1)) + sync


def held_bytes(memory: Sequence[MemoryParts]) -> int:
    """Return what is on each device of a pool while none of its roles computes.

    Roles without processes of their own share one, and so its reserve.
    """
    shared = max((parts.reserve for parts in memory if not parts.own_process), default=0)
    reserves = shared + sum(parts.reserve for parts in memory if parts.own_process)
    return reserves + sum(parts.held for parts in memory)


def pool_bytes(memory: Sequence[MemoryParts]) -> int:
    """Return the peak on each device of a pool whose roles take turns, or sync weights together."""
    turns = max((parts.passing for parts in memory), default=0)
    return held_bytes(memory) + max(turns, sum(parts.syncing for parts in memory))


def fits_pool(problem: Problem, pool: Pool, peak: int) -> bool:
    """Return True if ``peak`` bytes fit each device of the pool beside the required headroom."""
    smallest = min(problem.cluster.nodes[node].kind.memory_bytes for node, _ in pool.places)
    return peak <= smallest * (1 - problem.constraints.headroom)


def predict(problem: Problem, cost_model: BaseCostModel, mapping: Mapping) -> Prediction:
    """Return the predicted figures of a mapping, whether or not it fits its devices."""
    pools = {pool.name: pool for pool in mapping.pools}
    placed: dict[str, tuple[Placement, Pool]] = {each.role: (each, pools[each.pool]) for each in mapping.placements}
    pool_of = {each.role: each.pool for each in mapping.placements}
    stages = {
        stage.name: cost_model.stage_cost(problem, stage, *placed[stage.role], mapping.mode) for stage in problem.stages
    }
    memory = {role.name: cost_model.memory(problem, role, *placed[role.name], mapping.mode) for role in problem.roles}
    extras: dict[str, StageCost] = {}
    generator, trained = find_generator(problem), find_trained(problem)
    if generator is not None and trained is not None:
        extras["weight_sync"] = cost_model.sync_cost(
            problem, placed[trained.name], placed[generator.name], mapping.mode
        )
    switches: dict[str, float] = {}
    for role in problem.roles:
        cost = cost_model.switch_cost(problem, role, *placed[role.name], mapping.mode)
        if cost.seconds:
            extras[f"switch {role.name}"] = cost
            switches[role.name] = cost.seconds
    times: dict[str, float] = {}
    for stage in problem.stages:
        times |= stage_times(stage, stages[stage.name], switches.pop(stage.role, 0.0))
    controller = cost_model.controller_cost(problem, mapping.mode)
    if controller.seconds:
        extras["controller"] = controller
    sync = extras["weight_sync"].seconds if "weight_sync" in extras else 0.0
    total = step_seconds(problem, pool_of, times, sync, ahead(mapping), controller.seconds)
    peaks = {name: pool_bytes([memory[role] for role, home in pool_of.items() if home == name]) for name in pools}
    rate = problem.tokens / total if total else 0.0
    return Prediction(mapping, total, rate, {**stages, **extras}, memory, peaks)


def busy_shares(problem: Problem, prediction: Prediction) -> dict[str, float]:
    """Return pool → predicted share of a step in which its stages run; syncs and switches are no stages."""
    homes = {each.role: each.pool for each in prediction.mapping.placements}
    found = dict.fromkeys((pool.name for pool in prediction.mapping.pools), 0.0)
    for stage in problem.stages:
        found[homes[stage.role]] += prediction.stages[stage.name].seconds / prediction.step_seconds
    return {pool: min(share, 1.0) for pool, share in found.items()}
