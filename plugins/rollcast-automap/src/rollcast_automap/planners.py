"""Planners: HybridFlow's algorithms, every mapping, and branch and bound."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rollcast.contracts.mapping import (
    BaseCostModel,
    BasePlanner,
    Mapping,
    MemoryParts,
    Mode,
    Placement,
    Pool,
    Prediction,
    Problem,
    RoleSpec,
)
from rollcast.errors import ResourceError
from rollcast_automap.composition import (
    find_generator,
    find_trained,
    fits_pool,
    mode_of,
    pool_bytes,
    predict,
    stage_times,
    step_seconds,
)
from rollcast_automap.search_space import (
    Share,
    allocate,
    is_allowed,
    list_meshes,
    list_micro_batches,
    list_shares,
    partitions,
)

__all__ = ["BranchAndBound", "Exhaustive", "HybridFlow"]

Groups = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class _Option:
    """A placement of one role with its times, switches included, and its memory."""

    placement: Placement
    seconds: dict[str, float]
    memory: MemoryParts

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


class _Best:
    """The best mappings so far, by step time and then by the order of the search."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.found: list[Prediction] = []

    @property
    def limit(self) -> float:
        """Step time that a mapping has to beat."""
        return self.found[-1].step_seconds if len(self.found) == self._count else float("inf")

    def offer(self, prediction: Prediction) -> None:
        if prediction.step_seconds < self.limit:
            self.found = sorted([*self.found, prediction], key=lambda each: each.step_seconds)[: self._count]


def _homes(groups: Groups) -> dict[str, str]:
    return {role: f"pool_{index}" for index, group in enumerate(groups) for role in group}


def _stalenesses(problem: Problem, mode: Mode) -> list[int]:
    """Return the values worth trying: beyond 1, more staleness overlaps nothing further."""
    return [0, 1] if mode == "standalone" and problem.constraints.max_staleness >= 1 else [0]


def _allowed_groups(problem: Problem) -> Iterator[tuple[Groups, Mode]]:
    for groups in partitions([role.name for role in problem.roles]):
        mode = mode_of(problem, _homes(groups))
        if mode is not None and is_allowed(problem, groups):
            yield groups, mode


def _fits(problem: Problem, prediction: Prediction) -> bool:
    pools = prediction.mapping.pools
    return all(fits_pool(problem, pool, prediction.device_bytes[pool.name]) for pool in pools)


def _placements(problem: Problem, role: RoleSpec, pool: Pool) -> Iterator[Placement]:
    for mesh in list_meshes(problem, role, pool):
        for rows in list_micro_batches(problem, role, mesh):
            yield Placement(role.name, pool.name, mesh, rows)


def _none_fits(problem: Problem) -> ResourceError:
    roles = ", ".join(role.name for role in problem.roles)
    return ResourceError(
        f"no mapping of {roles} fits {problem.cluster.devices} devices with headroom "
        f"{problem.constraints.headroom:g} under these constraints; add devices, allow roles to share pools, or set "
        "offload or recompute"
    )


class Exhaustive(BasePlanner):
    """Prices every mapping of the search space; the oracle for small problems."""

    def plan(self, problem: Problem, cost_model: BaseCostModel, count: int = 1) -> Sequence[Prediction]:
        """Return up to ``count`` best mappings; see :class:`BasePlanner`."""
        best = _Best(count)
        for groups, mode in _allowed_groups(problem):
            homes = _homes(groups)
            for shares in itertools.product(*(list_shares(problem, group) for group in groups)):
                pools = allocate(problem, shares)
                if pools is None:
                    continue
                by_name = {pool.name: pool for pool in pools}
                choices = [list(_placements(problem, role, by_name[homes[role.name]])) for role in problem.roles]
                for placements in itertools.product(*choices):
                    for staleness in _stalenesses(problem, mode):
                        found = predict(problem, cost_model, Mapping(pools, placements, mode, staleness))
                        if _fits(problem, found):
                            best.offer(found)
        if not best.found:
            raise _none_fits(problem)
        return best.found


class BranchAndBound(BasePlanner):
    """Depth-first search with admissible bounds.

    The bound of a partial mapping is the step time with the cheapest placement of every open role and with a free
    weight sync until the pools are chosen. The step time grows with each stage's duration, so no better mapping is
    cut off. The cost of the weight sync may depend on meshes and pools, but not on micro-batches.
    """

    def plan(self, problem: Problem, cost_model: BaseCostModel, count: int = 1) -> Sequence[Prediction]:
        """Return up to ``count`` best mappings; see :class:`BasePlanner`."""
        best = _Best(count)
        search = _Search(problem, cost_model, best)
        for groups, mode in _allowed_groups(problem):
            search.search_groups(groups, mode)
        if not best.found:
            raise _none_fits(problem)
        return best.found


class HybridFlow(BasePlanner):
    """Algorithms 1 and 2 of HybridFlow (EuroSys 2025, section 6).

    Every set partition with every allocation gets the parallelism with the least time of a step (``auto_parallel``,
    cached by role and pool); the rollout shares the actor's devices, and generation never overlaps training. Where the
    paper chooses the parallelism of each role by itself, all roles of a pool are chosen together, so that a fast
    parallelism that leaves no memory for the others hides no slower one that does.
    """

    def plan(self, problem: Problem, cost_model: BaseCostModel, count: int = 1) -> Sequence[Prediction]:
        """Return up to ``count`` best mappings; see :class:`BasePlanner`."""
        best = _Best(count)
        search = _Search(problem, cost_model, best)
        generator, trained = find_generator(problem), find_trained(problem)
        for groups, mode in _allowed_groups(problem):
            if generator is None or trained is None or mode == "hybrid":
                search.search_groups(groups, mode)
        if not best.found:
            raise _none_fits(problem)
        return best.found


class _Search:
    """One search over the allocations and placements of partitions."""

    def __init__(self, problem: Problem, cost_model: BaseCostModel, best: _Best) -> None:
        self._problem = problem
        self._cost_model = cost_model
        self._best = best
        self._options: dict[object, list[_Option]] = {}
        self._syncs: dict[object, float] = {}
        self._synced = (find_generator(problem), find_trained(problem))
        self._stages_of = {
            role.name: [stage for stage in problem.stages if stage.role == role.name] for role in problem.roles
        }

    def search_groups(self, groups: Groups, mode: Mode) -> None:
        """Search the allocations and placements of one partition."""
        homes = _homes(groups)
        cheapest: list[list[tuple[Share, dict[str, float]]]] = []
        for group in groups:
            shares = [(share, self._floor(group, share, mode)) for share in list_shares(self._problem, group)]
            cheapest.append([(share, seconds) for share, seconds in shares if seconds is not None])
            if not cheapest[-1]:
                return
        floors = [_least([seconds for _, seconds in each]) for each in cheapest]
        self._allocate(groups, mode, homes, cheapest, floors, [])

    def _allocate(
        self,
        groups: Groups,
        mode: Mode,
        homes: dict[str, str],
        cheapest: list[list[tuple[Share, dict[str, float]]]],
        floors: list[dict[str, float]],
        chosen: list[Share],
    ) -> None:
        depth = len(chosen)
        if depth == len(groups):
            pools = allocate(self._problem, chosen)
            if pools is not None:
                self._place(pools, mode, homes)
            return
        left = self._problem.cluster.devices - sum(size for _, size in chosen) - (len(groups) - depth - 1)
        ranked = []
        for share, seconds in cheapest[depth]:
            if share[1] <= left:
                after = [*floors[:depth], seconds, *floors[depth + 1 :]]
                merged = {name: value for part in after for name, value in part.items()}
                ranked.append((self._bound(homes, merged, 0.0, mode), share, after))
        for bound, share, after in sorted(ranked, key=lambda each: (each[0], each[1])):
            if bound >= self._best.limit:
                break
            self._allocate(groups, mode, homes, cheapest, after, [*chosen, share])

    def _bound(self, homes: dict[str, str], seconds: dict[str, float], sync: float, mode: Mode) -> float:
        values = _stalenesses(self._problem, mode)
        return min(step_seconds(self._problem, homes, seconds, sync, value) for value in values)

    def _floor(self, group: Sequence[str], share: Share, mode: Mode) -> dict[str, float] | None:
        """Return the least seconds of each stage of a group on a share; None if none fits.

        The share is priced on an empty cluster. Other pools may spread it over more nodes, so the floor holds only
        for cost models in which a compact pool is no slower.
        """
        pools = allocate(self._problem, [share])
        seconds: dict[str, float] = {}
        if pools is None:
            return None
        held = 0
        for name in group:
            options = self._list_options(self._problem.role(name), pools[0], mode)
            if not options:
                return None
            seconds |= _least([option.seconds for option in options])
            held += min(option.memory.held for option in options)
        return seconds if fits_pool(self._problem, pools[0], held) else None

    def _list_options(self, role: RoleSpec, pool: Pool, mode: Mode) -> list[_Option]:
        """Return the placements of a role that fit by themselves, fastest first, without dominated ones."""
        nodes = self._problem.cluster.nodes
        shape = tuple(sorted((nodes[node].kind.name, nodes[node].link_bandwidth, count) for node, count in pool.places))
        key = (role.name, shape, mode)
        if key not in self._options:
            found = [self._price(role, placement, pool, mode) for placement in _placements(self._problem, role, pool)]
            fitting = [each for each in found if fits_pool(self._problem, pool, each.memory.total)]
            fitting.sort(key=lambda each: (each.total, each.memory.total))
            self._options[key] = _undominated(fitting, role in self._synced)
        return self._options[key]

    def _price(self, role: RoleSpec, placement: Placement, pool: Pool, mode: Mode) -> _Option:
        price = self._cost_model.stage_cost
        switch = self._cost_model.switch_cost(self._problem, role, placement, pool, mode).seconds
        seconds: dict[str, float] = {}
        for stage in self._stages_of[role.name]:
            seconds |= stage_times(stage, price(self._problem, stage, placement, pool, mode), switch)
            switch = 0.0
        return _Option(placement, seconds, self._cost_model.memory(self._problem, role, placement, pool, mode))

    def _place(self, pools: tuple[Pool, ...], mode: Mode, homes: dict[str, str]) -> None:
        by_name = {pool.name: pool for pool in pools}
        roles = self._problem.roles
        choices = [self._list_options(role, by_name[homes[role.name]], mode) for role in roles]
        if not all(choices):
            return
        floors = [_least([option.seconds for option in options]) for options in choices]
        self._choose(pools, mode, homes, choices, floors, [])

    def _choose(
        self,
        pools: tuple[Pool, ...],
        mode: Mode,
        homes: dict[str, str],
        choices: list[list[_Option]],
        floors: list[dict[str, float]],
        chosen: list[_Option],
    ) -> None:
        merged = {name: value for part in floors for name, value in part.items()}
        sync = self._sync_floor(pools, mode, homes, choices, chosen)
        if self._bound(homes, merged, sync, mode) >= self._best.limit or not self._shares_fit(pools, homes, chosen):
            return
        depth = len(chosen)
        if depth == len(choices):
            roles = self._problem.roles
            placements = tuple(
                replace(option.placement, pool=homes[role.name]) for role, option in zip(roles, chosen, strict=True)
            )
            for staleness in _stalenesses(self._problem, mode):
                self._best.offer(predict(self._problem, self._cost_model, Mapping(pools, placements, mode, staleness)))
            return
        for option in choices[depth]:
            after = [*floors[:depth], option.seconds, *floors[depth + 1 :]]
            self._choose(pools, mode, homes, choices, after, [*chosen, option])

    def _sync_floor(
        self,
        pools: tuple[Pool, ...],
        mode: Mode,
        homes: dict[str, str],
        choices: list[list[_Option]],
        chosen: list[_Option],
    ) -> float:
        """Return the least seconds of the weight sync between the chosen placements, or any where one is open."""
        generator, trained = self._synced
        if generator is None or trained is None:
            return 0.0
        by_name = {pool.name: pool for pool in pools}
        sides = []
        for role in (trained, generator):
            index = self._problem.roles.index(role)
            options = [chosen[index]] if index < len(chosen) else choices[index]
            meshes = {option.placement.mesh: option.placement for option in options}
            home = homes[role.name]
            sides.append([(replace(each, pool=home), by_name[home]) for each in meshes.values()])
        return min(self._sync(one, other, mode) for one in sides[0] for other in sides[1])

    def _sync(self, trained: tuple[Placement, Pool], rollout: tuple[Placement, Pool], mode: Mode) -> float:
        key = (trained[0].mesh, trained[1].places, rollout[0].mesh, rollout[1].places, mode)
        if key not in self._syncs:
            self._syncs[key] = self._cost_model.sync_cost(self._problem, trained, rollout, mode).seconds
        return self._syncs[key]

    def _shares_fit(self, pools: tuple[Pool, ...], homes: dict[str, str], chosen: list[_Option]) -> bool:
        return all(
            fits_pool(
                self._problem,
                pool,
                pool_bytes([each.memory for each in chosen if homes[each.placement.role] == pool.name]),
            )
            for pool in pools
        )


def _least(costs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the least value of each stage."""
    return {name: min(cost[name] for cost in costs) for name in costs[0]}


def _undominated(options: Sequence[_Option], per_mesh: bool) -> list[_Option]:
    """Leave out what another placement beats in every stage and in memory.

    Args:
        options: placements of one role on one pool, fastest first.
        per_mesh: compare only equal meshes, because the cost of the weight sync depends on the role's mesh.
    """
    kept: list[_Option] = []
    for option in options:
        rivals = (each for each in kept if not per_mesh or each.placement.mesh == option.placement.mesh)
        if not any(_dominates(other, option) for other in rivals):
            kept.append(option)
    return kept


def _dominates(one: _Option, other: _Option) -> bool:
    times = all(one.seconds[name] <= other.seconds[name] for name in other.seconds)
    mine, its = one.memory, other.memory
    peaks = mine.passing <= its.passing and mine.syncing <= its.syncing
    return times and peaks and mine.held <= its.held and mine.reserve <= its.reserve
