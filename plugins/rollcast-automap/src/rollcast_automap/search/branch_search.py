"""Depth-first search over the allocations and placements of partitions, with admissible bounds."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rollcast_automap.composition import (
    StepClock,
    find_generator,
    find_trained,
    fits_pool,
    memory_of,
    pool_bytes,
    predict,
)
from rollcast_automap.contract import (
    BaseCostModel,
    Mapping,
    MemoryParts,
    Mesh,
    Mode,
    Placement,
    Pool,
    Problem,
    RoleSpec,
)
from rollcast_automap.search.best import Best
from rollcast_automap.search.search_space import (
    Groups,
    Share,
    allocate,
    count_kinds,
    homes_of,
    list_placements,
    list_shares,
    list_stalenesses,
)

__all__ = ["BranchSearch"]

_NEVER = float("inf")
#: Seconds by slot: a slot is a stage of the problem, or generation without its tail, as in ``StepClock``.
Times = tuple[float, ...]
#: Free resources: devices, devices of each kind, and pools that may still have several kinds.
Free = tuple[int, ...]


@dataclass(frozen=True)
class _Option:
    """A placement of one role with its prices.

    Attributes:
        placement: placement of the role; the name of its pool is ignored.
        times: seconds of each slot of the role; loading and offloading are part of its first stage.
        memory: bytes on each device.
    """

    placement: Placement
    times: Times
    memory: MemoryParts


@dataclass(frozen=True)
class _Floor:
    """Lower bounds of the costs of roles, each cost by itself.

    Attributes:
        times: seconds of each slot of the roles.
        held: bytes on each device while no role computes.
    """

    times: Times
    held: int = 0


class _Partition:
    """A partition of the roles into pools, with the floors of each pool's shares.

    Args:
        problem: the problem.
        groups: roles of each pool.
        mode: rollout mode.
        slots: slots of each group's roles.
        floors: shares on which each group fits, with their floors.
        controller: seconds of the controller in a step.
    """

    def __init__(
        self,
        problem: Problem,
        groups: Groups,
        mode: Mode,
        slots: Sequence[tuple[int, ...]],
        floors: Sequence[list[tuple[Share, _Floor]]],
        controller: float,
    ) -> None:
        self.groups, self.mode, self.slots, self.floors = groups, mode, slots, floors
        self.homes = homes_of(groups)
        self.stalenesses = list_stalenesses(problem, mode)
        self._clock = StepClock(problem, self.homes)
        self._controller = controller
        self._width = len(problem.stages) + 1
        kinds = sorted({node.kind.name for node in problem.cluster.nodes})
        self._kinds = {kind: place for place, kind in enumerate(kinds, 1)}
        counts = [sum(node.devices for node in problem.cluster.nodes if node.kind.name == kind) for kind in kinds]
        self.free: Free = (problem.cluster.devices, *counts, count_kinds(problem) - 1)
        self._open: dict[tuple[int, Free], _Floor | None] = {}

    def take(self, free: Free, share: Share, others: int) -> Free | None:
        """Return the resources that a share leaves free; None if fewer than ``others`` devices are left."""
        kind, size = share
        left = list(free)
        left[0] -= size
        if kind:
            left[self._kinds[kind]] -= size
        else:
            left[-1] -= 1
        return None if left[0] < others or min(left) < 0 else tuple(left)

    def list_ranked(self, chosen: Sequence[_Floor], free: Free) -> list[tuple[float, int, Share, _Floor, Free]]:
        """Return (bound of the step time, number, share, floor, free resources) of the next group, by rising bound."""
        group = len(chosen)
        others = len(self.groups) - group - 1
        branches = []
        for number, (share, floor) in enumerate(self.floors[group]):
            left = self.take(free, share, others)
            if left is not None:
                branches.append((self.bound([*chosen, floor], left), number, share, floor, left))
        return sorted(branches, key=lambda branch: branch[:2])

    def bound(self, chosen: Sequence[_Floor], free: Free) -> float:
        """Return a lower bound of the step time for all ways to share the free resources among the other groups."""
        floors = list(chosen)
        others = len(self.groups) - len(chosen) - 1
        for group in range(len(chosen), len(self.groups)):
            floor = self._open_floor(group, (free[0] - others, *free[1:]))
            if floor is None:
                return _NEVER
            floors.append(floor)
        times = [0.0] * self._width
        for slots, floor in zip(self.slots, floors, strict=True):
            for slot, value in zip(slots, floor.times, strict=True):
                times[slot] = value
        return self.step(times, 0.0)

    def step(self, times: Sequence[float], sync: float, staleness: int | None = None) -> float:
        """Return the duration of a step; ``staleness`` None is the largest value, which has the shortest step."""
        value = self.stalenesses[-1] if staleness is None else staleness
        return self._clock.step(times, sync, value, self._controller)

    def _open_floor(self, group: int, free: Free) -> _Floor | None:
        """Return the floor of a group over all free shares; None if no share is free."""
        key = (group, free)
        if key not in self._open:
            fitting = [
                floor
                for (kind, size), floor in self.floors[group]
                if size <= free[0] and (size <= free[self._kinds[kind]] if kind else free[-1])
            ]
            self._open[key] = _least(fitting) if fitting else None
        return self._open[key]


class _Choice:
    """The candidate placements of each role on one allocation.

    Args:
        options: placements of each role.
        pool_of: number of the pool of each role.
        slots: slots of each role.
        width: number of all slots.
    """

    def __init__(
        self, options: Sequence[Sequence[_Option]], pool_of: Sequence[int], slots: Sequence[tuple[int, ...]], width: int
    ) -> None:
        self.options, self.pool_of, self.slots = options, pool_of, slots
        self.floors = [_least([_Floor(option.times, option.memory.held) for option in some]) for some in options]
        self.times = [0.0] * width
        for place, floor in enumerate(self.floors):
            self.put(self.times, place, floor.times)

    def put(self, times: list[float], role: int, values: Times) -> None:
        """Write the seconds of a role into ``times``."""
        for slot, value in zip(self.slots[role], values, strict=True):
            times[slot] = value

    def least_bytes(self, chosen: Sequence[_Option], pool: int) -> int:
        """Return the least bytes that each device of a pool needs, given the placements of the first roles."""
        mine = [option.memory for role, option in enumerate(chosen) if self.pool_of[role] == pool]
        rest = range(len(chosen), len(self.options))
        return pool_bytes(mine) + sum(self.floors[role].held for role in rest if self.pool_of[role] == pool)


class _Syncs:
    """The weight sync between the placements of the trained role and the rollout, by their meshes."""

    def __init__(self, seconds: dict[tuple[Mesh, Mesh], float]) -> None:
        self._seconds = seconds

    def least(self, trained: Mesh | None, rollout: Mesh | None) -> float:
        """Return the least seconds of a sync with these meshes; None stands for any mesh."""
        if trained is not None and rollout is not None:
            return self._seconds[trained, rollout]
        if trained is None and rollout is None:
            return self._any
        return self._of_trained[trained] if trained is not None else self._of_rollout[rollout]  # type: ignore[index]

    @cached_property
    def _any(self) -> float:
        return min(self._seconds.values())

    @cached_property
    def _of_trained(self) -> dict[Mesh, float]:
        return {mesh: min(v for (one, _), v in self._seconds.items() if one == mesh) for mesh, _ in self._seconds}

    @cached_property
    def _of_rollout(self) -> dict[Mesh, float]:
        return {mesh: min(v for (_, one), v in self._seconds.items() if one == mesh) for _, mesh in self._seconds}


class BranchSearch:
    """A search that offers its mappings to ``best``.

    The bound of a partial mapping is the step time with the cheapest share and placement of every role that is not
    placed yet, among the shares that are still free. Until the pools are chosen, the weight sync counts as 0 seconds.
    The step time grows with each stage's duration, so no better mapping is cut off.

    Args:
        problem: the problem.
        cost_model: model that prices placements. The search assumes that pools of equal shape have equal prices, that
            spreading a pool over more nodes makes no stage faster, and that the weight sync does not depend on
            micro-batches.
        best: collector of the best mappings.
    """

    def __init__(self, problem: Problem, cost_model: BaseCostModel, best: Best) -> None:
        self._problem = problem
        self._cost_model = cost_model
        self._best = best
        self._roles = {role.name: role for role in problem.roles}
        self._places = {role.name: place for place, role in enumerate(problem.roles)}
        self._stages = {
            role.name: [stage for stage in problem.stages if stage.role == role.name] for role in problem.roles
        }
        self._slots = {role.name: self._slots_of(role) for role in problem.roles}
        generator, trained = find_generator(problem), find_trained(problem)
        self._synced = None if generator is None or trained is None else (trained.name, generator.name)
        self._options: dict[object, list[_Option]] = {}
        self._floors: dict[object, _Floor | None] = {}
        self._syncs: dict[object, float] = {}

    def run(self, partitions: Iterable[tuple[Groups, Mode]]) -> None:
        """Search partitions, the most promising first."""
        opened = []
        for number, (groups, mode) in enumerate(partitions):
            partition = self._open(groups, mode)
            if partition is not None:
                opened.append((partition.bound([], partition.free), number, partition))
        for bound, _, partition in sorted(opened, key=lambda entry: entry[:2]):
            if bound < self._best.limit:
                self._allocate(partition, [], [], partition.free)

    def _slots_of(self, role: RoleSpec) -> tuple[int, ...]:
        mine = [place for place, stage in enumerate(self._problem.stages) if stage.role == role.name]
        return (*mine, len(self._problem.stages)) if role.kind == "generates" else tuple(mine)

    def _open(self, groups: Groups, mode: Mode) -> _Partition | None:
        """Return a partition with the floors of its shares; None if a group fits no share."""
        floors: list[list[tuple[Share, _Floor]]] = []
        for group in groups:
            shares = [(share, self._floor(group, share, mode)) for share in list_shares(self._problem, group)]
            floors.append([(share, floor) for share, floor in shares if floor is not None])
            if not floors[-1]:
                return None
        slots = [tuple(itertools.chain.from_iterable(self._slots[name] for name in group)) for group in groups]
        controller = self._cost_model.controller_cost(self._problem, mode).seconds
        return _Partition(self._problem, groups, mode, slots, floors, controller)

    def _floor(self, group: Sequence[str], share: Share, mode: Mode) -> _Floor | None:
        """Return the floor of a group on a share; None if the group does not fit.

        The share is priced on an empty cluster, on as few nodes as possible. A share of several kinds is bounded by
        shares of the same size and a single kind, because it cannot be faster than they are.
        """
        kind, size = share
        pools = [
            allocation[0]
            for device_kind in self._kinds_of(kind)
            if (allocation := allocate(self._problem, [(device_kind, size)]))
        ]
        if not pools:
            allocated = allocate(self._problem, [share])
            pools = [] if allocated is None else [allocated[0]]
        fitting = [floor for pool in pools if (floor := self._floor_on(group, pool, mode)) is not None]
        return _least(fitting) if fitting else None

    def _kinds_of(self, kind: str) -> list[str]:
        return [kind] if kind else sorted({node.kind.name for node in self._problem.cluster.nodes})

    def _floor_on(self, group: Sequence[str], pool: Pool, mode: Mode) -> _Floor | None:
        role_floors = [self._role_floor(name, pool, mode) for name in group]
        floors = [floor for floor in role_floors if floor is not None]
        held = sum(floor.held for floor in floors)
        if len(floors) < len(role_floors) or not fits_pool(self._problem, pool, held):
            return None
        times = tuple(itertools.chain.from_iterable(floor.times for floor in floors))
        return _Floor(times, held)

    def _role_floor(self, name: str, pool: Pool, mode: Mode) -> _Floor | None:
        key = (name, pool.places, mode)
        if key not in self._floors:
            options = self._list_options(name, pool, mode)
            floors = [_Floor(option.times, option.memory.held) for option in options]
            self._floors[key] = _least(floors) if floors else None
        return self._floors[key]

    def _list_options(self, name: str, pool: Pool, mode: Mode) -> list[_Option]:
        """Return the undominated placements of a role that fit on an otherwise empty pool, fastest first."""
        nodes = self._problem.cluster.nodes
        shape = tuple(sorted((nodes[node].kind.name, nodes[node].link_bandwidth, count) for node, count in pool.places))
        key = (name, shape, mode)
        if key not in self._options:
            role = self._roles[name]
            options = [
                self._price(role, placement, pool, mode) for placement in list_placements(self._problem, role, pool)
            ]
            fitting = [option for option in options if fits_pool(self._problem, pool, option.memory.total)]
            fitting.sort(key=lambda option: (sum(option.times), option.memory.total))
            self._options[key] = _undominated(fitting, self._synced is not None and name in self._synced)
        return self._options[key]

    def _price(self, role: RoleSpec, placement: Placement, pool: Pool, mode: Mode) -> _Option:
        model, problem = self._cost_model, self._problem
        costs = [model.stage_cost(problem, stage, placement, pool, mode) for stage in self._stages[role.name]]
        switch = model.switch_cost(problem, role, placement, pool, mode).seconds
        times = [cost.seconds + (0.0 if place else switch) for place, cost in enumerate(costs)]
        if role.kind == "generates":
            times.append(sum(times) - sum(cost.tail for cost in costs))
        return _Option(placement, tuple(times), memory_of(problem, model, role, placement, pool, mode))

    def _allocate(self, partition: _Partition, shares: Sequence[Share], floors: Sequence[_Floor], free: Free) -> None:
        if len(shares) == len(partition.groups):
            pools = allocate(self._problem, shares)
            if pools is not None:
                self._place(partition, pools)
            return
        for bound, _, share, floor, left in partition.list_ranked(floors, free):
            if bound >= self._best.limit:
                break
            self._allocate(partition, [*shares, share], [*floors, floor], left)

    def _place(self, partition: _Partition, pools: tuple[Pool, ...]) -> None:
        by_name = {pool.name: pool for pool in pools}
        homes = [by_name[partition.homes[name]] for name in self._roles]
        options = [
            self._list_options(name, pool, partition.mode) for name, pool in zip(self._roles, homes, strict=True)
        ]
        if not all(options):
            return
        width = len(self._problem.stages) + 1
        choice = _Choice(options, [pools.index(pool) for pool in homes], list(self._slots.values()), width)
        if partition.step(choice.times, 0.0) < self._best.limit:
            syncs = self._sync_between(options, homes, partition.mode)
            self._choose(partition, pools, choice, syncs, [], choice.times)

    def _choose(
        self,
        partition: _Partition,
        pools: tuple[Pool, ...],
        choice: _Choice,
        syncs: _Syncs | None,
        chosen: list[_Option],
        times: list[float],
    ) -> None:
        role = len(chosen)
        if role == len(choice.options):
            self._offer(partition, pools, chosen, times, self._sync(syncs, chosen))
            return
        pool = choice.pool_of[role]
        for option in choice.options[role]:
            after, placed = list(times), [*chosen, option]
            choice.put(after, role, option.times)
            if partition.step(after, self._sync(syncs, placed)) >= self._best.limit:
                continue
            if fits_pool(self._problem, pools[pool], choice.least_bytes(placed, pool)):
                self._choose(partition, pools, choice, syncs, placed, after)

    def _offer(
        self,
        partition: _Partition,
        pools: tuple[Pool, ...],
        chosen: Sequence[_Option],
        times: list[float],
        sync: float,
    ) -> None:
        placements = tuple(
            replace(option.placement, role=name, pool=partition.homes[name])
            for name, option in zip(self._roles, chosen, strict=True)
        )
        before = _NEVER
        for staleness in partition.stalenesses:
            seconds = partition.step(times, sync, staleness)
            if seconds < before and seconds < self._best.limit:
                mapping = Mapping(pools, placements, partition.mode, staleness)
                self._best.offer(predict(self._problem, self._cost_model, mapping))
            before = min(before, seconds)

    def _sync(self, syncs: _Syncs | None, chosen: Sequence[_Option]) -> float:
        """Return the least seconds of the weight sync with these placements of the first roles."""
        if syncs is None or self._synced is None:
            return 0.0
        places = (self._places[name] for name in self._synced)
        meshes = [chosen[place].placement.mesh if place < len(chosen) else None for place in places]
        return syncs.least(*meshes)

    def _sync_between(self, options: Sequence[Sequence[_Option]], homes: Sequence[Pool], mode: Mode) -> _Syncs | None:
        if self._synced is None:
            return None
        sides = []
        for name in self._synced:
            place = self._places[name]
            meshes = {option.placement.mesh: option.placement for option in options[place]}
            sides.append([(replace(mesh, pool=homes[place].name), homes[place]) for mesh in meshes.values()])
        floors = {}
        for trained, rollout in itertools.product(*sides):
            key = (trained[0].mesh, trained[1].places, rollout[0].mesh, rollout[1].places, mode)
            if key not in self._syncs:
                self._syncs[key] = self._cost_model.sync_cost(self._problem, trained, rollout, mode).seconds
            floors[trained[0].mesh, rollout[0].mesh] = self._syncs[key]
        return _Syncs(floors)


def _least(floors: Sequence[_Floor]) -> _Floor:
    """Return the floor below all of ``floors``: the least of each cost."""
    times = tuple(min(column) for column in zip(*(floor.times for floor in floors), strict=True))
    return _Floor(times, min(floor.held for floor in floors))


def _undominated(options: Sequence[_Option], per_mesh: bool) -> list[_Option]:
    """Return the placements that no other placement matches or beats in every time and in memory.

    Args:
        options: placements of one role on one pool, fastest first.
        per_mesh: compare only equal meshes, because the cost of the weight sync depends on the role's mesh.
    """
    options_by_mesh: dict[Mesh | None, list[_Option]] = {}
    undominated = []
    for option in options:
        rivals = options_by_mesh.setdefault(option.placement.mesh if per_mesh else None, [])
        if not any(_dominates(other, option) for other in rivals):
            rivals.append(option)
            undominated.append(option)
    return undominated


def _dominates(one: _Option, other: _Option) -> bool:
    mine, its = one.memory, other.memory
    if any(getattr(mine, name) > getattr(its, name) for name in ("passing", "syncing", "held", "reserve")):
        return False
    return all(first <= second for first, second in zip(one.times, other.times, strict=True))
