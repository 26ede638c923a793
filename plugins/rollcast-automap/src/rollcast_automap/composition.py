"""The time and memory of a mapping, composed from the prices of its stages; all planners share this code."""

from __future__ import annotations

from collections.abc import Mapping as MappingType
from collections.abc import Sequence
from dataclasses import replace

from rollcast_automap.contract import (
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
    "StepClock",
    "ahead",
    "busy_shares",
    "find_generator",
    "find_trained",
    "fits_pool",
    "held_bytes",
    "makespan",
    "modes_of",
    "pool_bytes",
    "predict",
    "memory_of",
    "stage_times",
    "step_seconds",
]


def find_generator(problem: Problem) -> RoleSpec | None:
    """Return the role that generates; None if none does."""
    return next((role for role in problem.roles if role.kind == "generates"), None)


def find_trained(problem: Problem) -> RoleSpec | None:
    """Return the role whose weights the rollout receives: ``actor``, else the first role that trains."""
    trained = [role for role in problem.roles if role.kind == "trains"]
    return next((role for role in trained if role.name == "actor"), trained[0] if trained else None)


def modes_of(problem: Problem, pool_of: MappingType[str, str]) -> tuple[Mode, ...]:
    """Return the rollout modes that are possible with these pools of the roles.

    On the pool of the trained role, the rollout is ``hybrid`` or ``colocated``. On a pool of its own it is
    ``standalone``. No mode exists for a rollout that shares its pool with other roles but not with the trained one.
    """
    generator, trained = find_generator(problem), find_trained(problem)
    if generator is None or trained is None:
        return ("hybrid",)
    home = pool_of[generator.name]
    possible: tuple[Mode, ...] = ()
    if home == pool_of[trained.name]:
        possible = ("hybrid", "colocated")
    elif sum(pool == home for pool in pool_of.values()) == 1:
        possible = ("standalone",)
    return tuple(mode for mode in possible if mode in problem.constraints.modes)


def ahead(mapping: Mapping) -> int:
    """Return the number of steps by which generation runs ahead of training; 0 if they take turns."""
    return mapping.max_staleness if mapping.mode == "standalone" else 0


class StepClock:
    """The duration of a step for one partition of the roles into pools.

    The times of a step are a list: the seconds of each stage in the order of the problem, and as the last element the
    seconds of generation without its tail.

    Args:
        problem: the problem.
        pool_of: role → name of its pool.
    """

    def __init__(self, problem: Problem, pool_of: MappingType[str, str]) -> None:
        places = {stage.name: place for place, stage in enumerate(problem.stages)}
        pools = {name: place for place, name in enumerate(dict.fromkeys(pool_of.values()))}
        self._pools = len(pools)
        self._stages = [
            (place, pools[pool_of[stage.role]], tuple(places[name] for name in stage.waits_for))
            for place, stage in enumerate(problem.stages)
        ]
        self._generating = [place for place, stage in enumerate(problem.stages) if stage.kind == "generate"]

    def makespan(self, times: Sequence[float]) -> float:
        """Return the end of the last stage in seconds.

        A stage starts after the stages that it waits for and after the earlier stages of its pool. Times therefore add
        up within a pool, and the slowest pool decides.
        """
        free = [0.0] * self._pools
        ends: list[float] = []
        for place, pool, waits_for in self._stages:
            start = free[pool]
            for other in waits_for:
                start = max(start, ends[other])
            free[pool] = start + times[place]
            ends.append(free[pool])
        return max(ends, default=0.0)

    def step(self, times: Sequence[float], sync: float, staleness: int, controller: float = 0.0) -> float:
        """Return the duration of a step in seconds; see :func:`step_seconds`."""
        if not staleness:
            return self.makespan(times) + controller + sync
        others = list(times)
        generation = 0.0
        for place in self._generating:
            generation += times[place]
            others[place] = 0.0
        training = self.makespan(others) + controller
        return max(training, times[-1], (generation + training) / (staleness + 1)) + sync


def makespan(problem: Problem, pool_of: MappingType[str, str], seconds: MappingType[str, float]) -> float:
    """Return the end of the last stage in seconds."""
    return StepClock(problem, pool_of).makespan([seconds[stage.name] for stage in problem.stages])


def stage_times(stage: StageSpec, cost: StageCost, switch: float = 0.0) -> dict[str, float]:
    """Return the times of a stage that :func:`step_seconds` reads: name of a time → seconds.

    Generation has a second time: its duration without the tail. If generation runs ahead, rows of later steps fill
    the tail.

    Args:
        stage: the stage.
        cost: its cost.
        switch: seconds of loading and offloading its role, for the first stage of the role in a step. Only the pool of
            the role waits for the switch.
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

    If generation runs ``s`` steps ahead, the slowest of three limits counts. The first is the duration of training. The
    second is the generation of one step's rows with full slots, because rows of later steps fill the tail. The third
    is latency: the rows of a step start when the weights of ``s + 1`` steps before have been sent, so generation and
    training of a step together take at most ``s + 1`` steps.

    Args:
        problem: the problem.
        pool_of: role → name of its pool.
        seconds: times of the stages, as :func:`stage_times` returns them.
        sync: seconds of the weight sync, during which neither side computes.
        staleness: steps by which generation runs ahead of training; 0 if they take turns.
        controller: seconds of the controller in a step. Training waits for the controller; generation that runs ahead
            does not.
    """
    filled = sum(
        seconds.get(_filled(stage), seconds[stage.name]) for stage in problem.stages if stage.kind == "generate"
    )
    times = [*(seconds[stage.name] for stage in problem.stages), filled]
    return StepClock(problem, pool_of).step(times, sync, staleness, controller)


def held_bytes(memory: Sequence[MemoryParts]) -> int:
    """Return the bytes in use on each device of a pool while none of its roles computes.

    Roles without a process of their own share one process, whose reserve counts once.
    """
    shared = max((parts.reserve for parts in memory if not parts.own_process), default=0)
    reserves = shared + sum(parts.reserve for parts in memory if parts.own_process)
    return reserves + sum(parts.held for parts in memory)


def pool_bytes(memory: Sequence[MemoryParts]) -> int:
    """Return the peak on each device of a pool whose roles take turns, or sync weights together."""
    turns = max((parts.passing for parts in memory), default=0)
    return held_bytes(memory) + max(turns, sum(parts.syncing for parts in memory))


def fits_pool(problem: Problem, pool: Pool, peak: int) -> bool:
    """Return True if ``peak`` bytes fit on each device of the pool and leave the required headroom free."""
    smallest = min(problem.cluster.nodes[node].kind.memory_bytes for node, _ in pool.places)
    return peak <= smallest * (1 - problem.constraints.headroom)


def memory_of(
    problem: Problem, cost_model: BaseCostModel, role: RoleSpec, placement: Placement, pool: Pool, mode: Mode
) -> MemoryParts:
    """Return the memory of a role on each of its devices.

    A rollout in another mode than ``hybrid`` is priced with processes of its own, even if the configured one has none.
    """
    if role.kind == "generates" and mode != "hybrid" and not role.own_process:
        role = replace(role, own_process=True)
    return cost_model.memory(problem, role, placement, pool, mode)


def predict(problem: Problem, cost_model: BaseCostModel, mapping: Mapping) -> Prediction:
    """Return the predicted figures of a mapping, whether or not it fits its devices."""
    pools = {pool.name: pool for pool in mapping.pools}
    placed: dict[str, tuple[Placement, Pool]] = {
        placement.role: (placement, pools[placement.pool]) for placement in mapping.placements
    }
    pool_of = {placement.role: placement.pool for placement in mapping.placements}
    stages = {
        stage.name: cost_model.stage_cost(problem, stage, *placed[stage.role], mapping.mode) for stage in problem.stages
    }
    memory = {
        role.name: memory_of(problem, cost_model, role, *placed[role.name], mapping.mode) for role in problem.roles
    }
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
    """Return pool → predicted share of a step in which its stages run; syncs and switches do not count."""
    homes = {placement.role: placement.pool for placement in prediction.mapping.placements}
    shares = dict.fromkeys((pool.name for pool in prediction.mapping.pools), 0.0)
    for stage in problem.stages:
        shares[homes[stage.role]] += prediction.stages[stage.name].seconds / prediction.step_seconds
    return {pool: min(share, 1.0) for pool, share in shares.items()}
