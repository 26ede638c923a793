"""The planner ``exhaustive``: every mapping of the search space, composed with numpy.

The planner serves as an oracle for the others. It shares the search space and the prices with them, but not their
bounds and not the code that composes a step from its stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rollcast_automap.composition import find_generator, find_trained, memory_of, predict
from rollcast_automap.contract import (
    BaseCostModel,
    BasePlanner,
    Mapping,
    Mode,
    Placement,
    Pool,
    Prediction,
    Problem,
    RoleSpec,
)
from rollcast_automap.search.best import Best
from rollcast_automap.search.search_space import (
    Groups,
    allocate,
    homes_of,
    list_partitions,
    list_placements,
    list_shares,
    list_stalenesses,
)

__all__ = ["Exhaustive"]

Floats = npt.NDArray[np.float64]
#: Mappings that are composed at a time.
_BLOCK = 1 << 21


@dataclass(frozen=True)
class _Table:
    """The placements of a role on a pool with their prices, one number for each placement.

    Attributes:
        placements: the placements.
        seconds: stage → seconds; loading and offloading are part of the role's first stage.
        filled: seconds of generation without its tail; zeros for roles that do not generate.
        held, passing, syncing, reserve: bytes, as in ``MemoryParts``.
        own_process: the role has processes of its own.
    """

    placements: Sequence[Placement]
    seconds: dict[str, Floats]
    filled: Floats
    held: Floats
    passing: Floats
    syncing: Floats
    reserve: Floats
    own_process: bool

    def part(self, wanted: slice) -> _Table:
        """Return a table of some placements."""
        return replace(
            self,
            placements=self.placements[wanted],
            seconds={name: values[wanted] for name, values in self.seconds.items()},
            filled=self.filled[wanted],
            held=self.held[wanted],
            passing=self.passing[wanted],
            syncing=self.syncing[wanted],
            reserve=self.reserve[wanted],
        )


class Exhaustive(BasePlanner):
    """Every mapping of the search space; the oracle for small problems."""

    def plan(self, problem: Problem, cost_model: BaseCostModel, count: int = 1) -> Sequence[Prediction]:
        """Return up to ``count`` best mappings; see :class:`BasePlanner`."""
        best = Best(count)
        search = _Enumeration(problem, cost_model, best)
        for groups, mode in list_partitions(problem):
            search.compose(groups, mode)
        return best.list(problem)


class _Enumeration:
    def __init__(self, problem: Problem, cost_model: BaseCostModel, best: Best) -> None:
        self._problem, self._cost_model, self._best = problem, cost_model, best
        self._tables: dict[object, _Table] = {}
        self._syncs: dict[object, float] = {}

    def compose(self, groups: Groups, mode: Mode) -> None:
        """Offer the best mappings of one partition."""
        for shares in itertools.product(*(list_shares(self._problem, group) for group in groups)):
            if sum(size for _, size in shares) > self._problem.cluster.devices:
                continue
            pools = allocate(self._problem, shares)
            if pools is not None:
                self._compose_pools(pools, homes_of(groups), mode)

    def _compose_pools(self, pools: tuple[Pool, ...], homes: dict[str, str], mode: Mode) -> None:
        by_name = {pool.name: pool for pool in pools}
        tables = [self._table(role, by_name[homes[role.name]], mode) for role in self._problem.roles]
        for block in _blocks(tables):
            sync = self._sync_of(block, by_name, homes, mode)
            controller = self._cost_model.controller_cost(self._problem, mode).seconds
            fits = self._fits(block, pools, homes)
            before = np.full((1,) * len(block), np.inf)
            for staleness in list_stalenesses(self._problem, mode):
                seconds = self._steps(block, homes, staleness, controller) + sync
                better = np.where(fits & (seconds < before), seconds, np.inf)
                self._offer(block, better, pools, homes, mode, staleness)
                before = np.minimum(before, seconds)

    def _table(self, role: RoleSpec, pool: Pool, mode: Mode) -> _Table:
        key = (role.name, pool.places, mode)
        if key not in self._tables:
            problem, model = self._problem, self._cost_model
            placements = list_placements(problem, role, pool)
            stages = [stage for stage in problem.stages if stage.role == role.name]
            costs = {
                s.name: [model.stage_cost(problem, s, placement, pool, mode) for placement in placements]
                for s in stages
            }
            memory = [memory_of(problem, model, role, placement, pool, mode) for placement in placements]
            switch = _column(
                model.switch_cost(problem, role, placement, pool, mode).seconds for placement in placements
            )
            seconds = {name: _column(cost.seconds for cost in costs_of_stage) for name, costs_of_stage in costs.items()}
            if stages:
                seconds[stages[0].name] = seconds[stages[0].name] + switch
            filled = np.zeros(len(placements))
            if role.kind == "generates":
                filled = sum(
                    (_column(c.seconds - c.tail for c in costs_of_stage) for costs_of_stage in costs.values()), switch
                )
            self._tables[key] = _Table(
                placements,
                seconds,
                filled,
                _column(parts.held for parts in memory),
                _column(parts.passing for parts in memory),
                _column(parts.syncing for parts in memory),
                _column(parts.reserve for parts in memory),
                any(parts.own_process for parts in memory),
            )
        return self._tables[key]

    def _steps(self, block: Sequence[_Table], homes: dict[str, str], staleness: int, controller: float) -> Floats:
        """Return the duration of a step of each mapping without its weight sync."""
        places = {role.name: axis for axis, role in enumerate(self._problem.roles)}
        zero = np.zeros((1,) * len(block))
        generation, filled, free = zero, zero, dict.fromkeys(homes.values(), zero)
        ends: dict[str, Floats] = {}
        for axis, table in enumerate(block):
            filled = filled + _along(table.filled, axis, len(block))
        for stage in self._problem.stages:
            axis, pool = places[stage.role], homes[stage.role]
            seconds = _along(block[axis].seconds[stage.name], axis, len(block))
            if stage.kind == "generate":
                generation = generation + seconds
                seconds = seconds if not staleness else zero
            start = free[pool]
            for name in stage.waits_for:
                start = np.maximum(start, ends[name])
            free[pool] = ends[stage.name] = start + seconds
        training = zero
        for end in ends.values():
            training = np.maximum(training, end)
        training = training + controller
        if not staleness:
            return training
        return np.maximum(np.maximum(training, filled), (generation + training) / (staleness + 1))

    def _sync_of(self, block: Sequence[_Table], pools: dict[str, Pool], homes: dict[str, str], mode: Mode) -> Floats:
        generator, trained = find_generator(self._problem), find_trained(self._problem)
        if generator is None or trained is None:
            return np.zeros((1,) * len(block))
        roles = list(self._problem.roles)
        one, other = roles.index(trained), roles.index(generator)
        shape = [1] * len(block)
        shape[one], shape[other] = len(block[one].placements), len(block[other].placements)
        table = np.empty((shape[one], shape[other]))
        for row, column in np.ndindex(table.shape):
            sides = [
                (replace(block[axis].placements[place], pool=homes[role.name]), pools[homes[role.name]])
                for role, axis, place in ((trained, one, row), (generator, other, column))
            ]
            table[row, column] = self._sync(sides[0], sides[1], mode)
        return (table if one < other else table.T).reshape(shape)

    def _sync(self, trained: tuple[Placement, Pool], rollout: tuple[Placement, Pool], mode: Mode) -> float:
        key = (trained[0], trained[1].places, rollout[0], rollout[1].places, mode)
        if key not in self._syncs:
            self._syncs[key] = self._cost_model.sync_cost(self._problem, trained, rollout, mode).seconds
        return self._syncs[key]

    def _fits(self, block: Sequence[_Table], pools: tuple[Pool, ...], homes: dict[str, str]) -> npt.NDArray[np.bool_]:
        mask = np.ones((1,) * len(block), dtype=bool)
        for pool in pools:
            mine = [
                (axis, block[axis]) for axis, role in enumerate(self._problem.roles) if homes[role.name] == pool.name
            ]
            shared = held = passing = syncing = np.zeros((1,) * len(block))
            for axis, table in mine:
                reserve = _along(table.reserve, axis, len(block))
                held = held + _along(table.held, axis, len(block)) + (reserve if table.own_process else 0.0)
                shared = shared if table.own_process else np.maximum(shared, reserve)
                passing = np.maximum(passing, _along(table.passing, axis, len(block)))
                syncing = syncing + _along(table.syncing, axis, len(block))
            smallest = min(self._problem.cluster.nodes[node].kind.memory_bytes for node, _ in pool.places)
            peak = held + shared + np.maximum(passing, syncing)
            mask = mask & (peak <= smallest * (1 - self._problem.constraints.headroom))
        return mask

    def _offer(
        self,
        block: Sequence[_Table],
        seconds: Floats,
        pools: tuple[Pool, ...],
        homes: dict[str, str],
        mode: Mode,
        staleness: int,
    ) -> None:
        if seconds.min() >= self._best.limit:
            return
        shape = np.broadcast_shapes(seconds.shape, tuple(len(table.placements) for table in block))
        every = np.broadcast_to(seconds, shape).ravel()
        below = np.flatnonzero(every < self._best.limit)
        for number in below[np.argsort(every[below], kind="stable")]:
            if every[number] >= self._best.limit:
                return
            picked = np.unravel_index(int(number), shape)
            placements = tuple(
                replace(table.placements[int(place)], pool=homes[role.name])
                for table, place, role in zip(block, picked, self._problem.roles, strict=True)
            )
            self._best.offer(predict(self._problem, self._cost_model, Mapping(pools, placements, mode, staleness)))


def _blocks(tables: Sequence[_Table]) -> Iterator[list[_Table]]:
    """Split the first role's placements, so that each yielded block has at most ``_BLOCK`` mappings if possible."""
    rest = int(np.prod([len(table.placements) for table in tables[1:]], dtype=np.int64))
    if not rest or not tables[0].placements:
        return
    step = max(_BLOCK // rest, 1)
    for start in range(0, len(tables[0].placements), step):
        yield [tables[0].part(slice(start, start + step)), *tables[1:]]


def _column(values: Any) -> Floats:
    return np.array([float(value) for value in values])


def _along(values: Floats, axis: int, axes: int) -> Floats:
    return values.reshape([-1 if place == axis else 1 for place in range(axes)])
