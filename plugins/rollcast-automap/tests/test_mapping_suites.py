"""The suites of cost models and planners pass what keeps the contract, and catch what does not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from rollcast.errors import ResourceError
from rollcast_automap.contract import (
    BaseCostModel,
    BasePlanner,
    Constraints,
    CostModelConfig,
    Mapping,
    MemoryParts,
    Mesh,
    Mode,
    Placement,
    Pool,
    Prediction,
    Problem,
    RoleSpec,
    StageCost,
    StageSpec,
)
from rollcast_automap.testing import CostModelSuite, PlannerSuite, _Prices


class TestPrices(CostModelSuite):
    def build(self) -> BaseCostModel:
        """Return the suite's own prices."""
        return _Prices(CostModelConfig())


class _OnePool(BasePlanner):
    """Everything in one pool or, if roles must be apart or pinned, each in a pool of its own."""

    def plan(self, problem: Problem, cost_model: BaseCostModel, count: int = 1) -> Sequence[Prediction]:
        """Return one mapping."""
        limits, names = problem.constraints, [role.name for role in problem.roles]
        split = bool(limits.pinned or limits.forbidden or "hybrid" not in limits.modes)
        pools: tuple[Pool, ...] = (Pool("all", ((0, 2),)),)
        if split:
            pools = (Pool("actor", ((0, 1),)), Pool("rollout", ((0, 1),)), Pool("critic", ((1, 1),)))
        homes = {name: name if split else "all" for name in names}
        mesh = Mesh(tensor=pools[0].devices)
        placements = tuple(Placement(name, homes[name], mesh, 1) for name in names)
        mapping = Mapping(pools, placements, "standalone" if split else "hybrid")
        by_name = {pool.name: pool for pool in pools}
        memory = {
            role.name: cost_model.memory(problem, role, placed, by_name[placed.pool], mapping.mode)
            for role, placed in zip(problem.roles, placements, strict=True)
        }
        peaks = {pool.name: sum(memory[name].total for name in names if homes[name] == pool.name) for pool in pools}
        if max(peaks.values()) > problem.cluster.nodes[0].kind.memory_bytes:
            raise ResourceError("nothing fits")
        return [Prediction(mapping, 1.0, problem.tokens, {}, memory, peaks)]


class TestOnePool(PlannerSuite):
    def build(self) -> BasePlanner:
        """Return the planner above."""
        return _OnePool()


class _Random(_Prices):
    counter = itertools.count(1)

    def stage_cost(self, problem: Problem, stage: StageSpec, placement: Placement, pool: Pool, mode: Mode) -> StageCost:
        return StageCost(compute=float(next(self.counter)))


class _Negative(_Prices):
    def sync_cost(
        self, problem: Problem, trained: tuple[Placement, Pool], rollout: tuple[Placement, Pool], mode: Mode
    ) -> StageCost:
        return StageCost(idle=-1.0)


class _ByName(_Prices):
    def stage_cost(self, problem: Problem, stage: StageSpec, placement: Placement, pool: Pool, mode: Mode) -> StageCost:
        return StageCost(compute=float(len(pool.name)))


class _Shrinking(_Prices):
    def memory(self, problem: Problem, role: RoleSpec, placement: Placement, pool: Pool, mode: Mode) -> MemoryParts:
        return MemoryParts(parameters=10**9 // placement.micro_batch_rows)


class _Faster(_Prices):
    def stage_cost(self, problem: Problem, stage: StageSpec, placement: Placement, pool: Pool, mode: Mode) -> StageCost:
        return StageCost(compute=1.0 / problem.rows)


class _SyncByRows(_Prices):
    def sync_cost(
        self, problem: Problem, trained: tuple[Placement, Pool], rollout: tuple[Placement, Pool], mode: Mode
    ) -> StageCost:
        return StageCost(communication=float(trained[0].micro_batch_rows))


@pytest.mark.parametrize(
    ("model", "test"),
    [
        (_Random, "test_equal_arguments_have_equal_prices"),
        (_Negative, "test_every_part_is_a_duration"),
        (_ByName, "test_the_name_of_a_pool_has_no_price"),
        (_Shrinking, "test_larger_micro_batches_take_no_less_memory"),
        (_Faster, "test_more_prompts_take_no_less_time"),
        (_SyncByRows, "test_the_weight_sync_does_not_depend_on_micro_batches"),
    ],
)
def test_broken_prices_are_caught(model: type[BaseCostModel], test: str) -> None:
    suite = CostModelSuite()
    suite.build = lambda: model(CostModelConfig())  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        getattr(suite, test)()


def _changed(change: Callable[[Prediction], list[Prediction]]) -> BasePlanner:
    class Changed(_OnePool):
        def plan(self, problem: Problem, cost_model: BaseCostModel, count: int = 1) -> Sequence[Prediction]:
            return change(super().plan(problem, cost_model, count)[0])

    return Changed()


@pytest.mark.parametrize(
    "change",
    [
        lambda found: [replace(found, mapping=replace(found.mapping, max_staleness=1))],
        lambda found: [replace(found, mapping=replace(found.mapping, mode="standalone"))],
        lambda found: [replace(found, mapping=replace(found.mapping, placements=found.mapping.placements[1:]))],
        lambda found: [replace(found, mapping=replace(found.mapping, pools=(Pool("all", ((0, 3),)),)))],
        lambda found: [replace(found, device_bytes=dict.fromkeys(found.device_bytes, 10**12))],
    ],
)
def test_broken_mappings_are_caught(change: Callable[[Prediction], list[Prediction]]) -> None:
    suite = PlannerSuite()
    suite.build = lambda: _changed(change)  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        suite.test_mappings_are_whole_and_obey_the_constraints()


def test_a_wrong_order_is_caught() -> None:
    suite = PlannerSuite()
    suite.build = lambda: _changed(lambda found: [found, replace(found, step_seconds=0.5)])  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        suite.test_the_best_come_first()


_APART = Constraints(forbidden=(("actor", "critic"),))
_TOGETHER = Constraints(together=(("actor", "critic"),))


@pytest.mark.parametrize(
    ("asked", "obeyed"),
    [(Constraints(pinned={"critic": 1}), Constraints()), (_APART, Constraints()), (_TOGETHER, _APART)],
)
def test_a_planner_that_ignores_a_limit_is_caught(asked: Constraints, obeyed: Constraints) -> None:
    class Ignoring(_OnePool):
        def plan(self, problem: Problem, cost_model: BaseCostModel, count: int = 1) -> Sequence[Prediction]:
            return super().plan(replace(problem, constraints=obeyed), cost_model, count)

    suite = PlannerSuite()
    suite.build = Ignoring  # type: ignore[method-assign]
    suite.constraints = (asked,)  # type: ignore[misc]
    with pytest.raises(AssertionError):
        suite.test_mappings_are_whole_and_obey_the_constraints()
