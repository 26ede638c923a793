"""The conformance suites of cost models and planners.

Example, in a plugin's tests::

    from rollcast_automap.testing import CostModelSuite, PlannerSuite

    class TestMyPrices(CostModelSuite):
        name = "my_prices"

    class TestMySearch(PlannerSuite):
        name = "my_search"
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from rollcast import build_section
from rollcast.errors import ResourceError
from rollcast_automap.contract import (
    BaseCostModel,
    BasePlanner,
    Cluster,
    Constraints,
    CostModelConfig,
    DeviceKind,
    Lengths,
    MemoryParts,
    Mesh,
    Mode,
    ModelFacts,
    Node,
    Placement,
    Pool,
    Prediction,
    Problem,
    RoleSpec,
    StageCost,
    StageSpec,
    cost_models,
    planners,
)

__all__ = ["CostModelSuite", "PlannerSuite", "small_problem"]

_DEVICE = DeviceKind("suite", 40 * 10**9, {"bfloat16": 1e14, "float32": 1e13}, 1e12, 2e10)
_MODEL = ModelFacts(
    layers=16, hidden=2048, heads=16, kv_heads=8, ffn=6144, vocab=32000, parameters=10**9, head_size=128
)


def small_problem(devices: int = 4, constraints: Constraints | None = None) -> Problem:
    """Return the problem of a PPO step with a model of 1e9 parameters: rollout, critic's values and two updates.

    Args:
        devices: number of devices on each of two nodes.
        constraints: restrictions on mappings; none by default.
    """
    return Problem(
        roles=(
            RoleSpec("actor", "trains", _MODEL, "fsdp"),
            RoleSpec("rollout", "generates", _MODEL, "vllm"),
            RoleSpec("critic", "trains", _MODEL, "fsdp", value_head=True),
        ),
        stages=(
            StageSpec("rollout", "rollout", "generate"),
            StageSpec("values", "critic", "forward", ("rollout",)),
            StageSpec("update_critic", "critic", "update", ("rollout", "values")),
            StageSpec("update_actor", "actor", "update", ("rollout", "values")),
        ),
        prompts=16,
        samples=4,
        mini_batches=2,
        epochs=1,
        prompt_lengths=Lengths(128.0, 256),
        response_lengths=Lengths(256.0, 1024),
        cluster=Cluster((Node(_DEVICE, devices, 1e11),) * 2, 1e10),
        constraints=constraints or Constraints(),
    )


def _pool(devices: int, name: str = "pool") -> Pool:
    return Pool(name, ((0, devices),))


class CostModelSuite:
    """Conformance tests of one cost model; subclass it and set the name.

    Attributes:
        name: name of the cost model in ``rollcast.cost_models``.
        meshes: meshes to price, of 1 to 4 devices each.
        modes: modes to price.
        settings: options ``cost_model.*`` of the cost model.
    """

    name: ClassVar[str] = ""
    settings: ClassVar[Mapping[str, Any]] = {}
    meshes: ClassVar[tuple[Mesh, ...]] = (Mesh(), Mesh(data=2), Mesh(tensor=2), Mesh(data=2, tensor=2))
    modes: ClassVar[tuple[Mode, ...]] = ("hybrid", "colocated", "standalone")

    def build(self) -> BaseCostModel:
        """Build a cost model with ``settings``; override it for one that is not registered."""
        kind = cost_models.get(self.name)
        return kind(build_section(kind.config_schema, dict(self.settings), "cost_model", closed=True))

    def problem(self) -> Problem:
        """Return the problem to price; override it for a cost model that supports only some sizes or engines."""
        return small_problem()

    def _placed(self, role: str, rows: int = 4) -> Iterator[tuple[Placement, Pool]]:
        for mesh in self.meshes:
            yield Placement(role, "pool", mesh, rows), _pool(mesh.size)

    def _stages(self, problem: Problem) -> Iterator[tuple[StageSpec, Placement, Pool, Mode]]:
        for stage in problem.stages:
            for placement, pool in self._placed(stage.role):
                for mode in self.modes:
                    yield stage, placement, pool, mode

    def _costs(self, problem: Problem, model: BaseCostModel) -> Iterator[StageCost]:
        for mode in self.modes:
            yield model.controller_cost(problem, mode)
        for asked in self._stages(problem):
            yield model.stage_cost(problem, *asked)
        for trained, rollout in zip(self._placed("actor"), self._placed("rollout"), strict=True):
            for mode in self.modes:
                yield model.sync_cost(problem, trained, rollout, mode)
        for role in problem.roles:
            for placement, pool in self._placed(role.name):
                for mode in self.modes:
                    yield model.switch_cost(problem, role, placement, pool, mode)

    def test_every_part_is_a_duration(self) -> None:
        """Check that parts are finite and at least 0, and that a stage takes time."""
        problem, model = self.problem(), self.build()
        for cost in self._costs(problem, model):
            assert all(math.isfinite(value) and value >= 0 for value in cost.parts.values()), cost
        for asked in self._stages(problem):
            assert model.stage_cost(problem, *asked).seconds > 0

    def test_equal_arguments_have_equal_prices(self) -> None:
        """Check that repeated calls, and a second cost model, return the same prices."""
        problem, model = self.problem(), self.build()
        first = list(self._costs(problem, model))
        assert list(self._costs(problem, model)) == first
        assert list(self._costs(problem, self.build())) == first

    def test_the_name_of_a_pool_has_no_price(self) -> None:
        """Check that prices do not depend on pool names, because planners cache prices by shape."""
        problem, model = self.problem(), self.build()
        for stage, placement, pool, mode in self._stages(problem):
            other = replace(placement, pool="elsewhere"), replace(pool, name="elsewhere")
            expected = model.stage_cost(problem, stage, placement, pool, mode)
            assert model.stage_cost(problem, stage, *other, mode) == expected

    def test_more_prompts_take_no_less_time(self) -> None:
        """Check that four times the prompts take no less time."""
        problem, model = self.problem(), self.build()
        more = replace(problem, prompts=4 * problem.prompts)
        for asked in self._stages(problem):
            assert model.stage_cost(more, *asked).seconds >= model.stage_cost(problem, *asked).seconds

    def test_a_replica_decodes_more_and_longer_rows_no_faster(self) -> None:
        """The speed of generation, of a cost model that has one."""
        problem, model = self.problem(), self.build()
        for stage, placement, pool, mode in self._stages(problem):
            if stage.kind != "generate":
                continue
            speed = model.generation_speed(problem, stage, placement, pool, mode)
            if speed is None:
                return
            few, many, longer = speed.decode(1, 200.0), speed.decode(4, 200.0), speed.decode(4, 800.0)
            assert 0 < few <= many <= longer < math.inf, (few, many, longer)
            assert many <= 4 * few  # decoded together, rows are no slower than one after the other
            assert 0 <= speed.prefill < math.inf

    def test_larger_micro_batches_take_no_less_memory(self) -> None:
        """Check that bytes are non-negative integers and do not shrink with the rows of a micro-batch."""
        problem, model = self.problem(), self.build()
        for role in problem.roles:
            for mode in self.modes:
                for (few, pool), (many, _) in zip(self._placed(role.name, 1), self._placed(role.name, 16), strict=True):
                    small = model.memory(problem, role, few, pool, mode)
                    large = model.memory(problem, role, many, pool, mode)
                    assert 0 <= small.held <= small.total <= large.total
                    assert isinstance(large.total, int)

    def test_the_weight_sync_does_not_depend_on_micro_batches(self) -> None:
        """Check that the cost of the weight sync is independent of micro-batches, as planners assume."""
        problem, model = self.problem(), self.build()
        for few, many, rollout in zip(
            self._placed("actor", 1), self._placed("actor", 8), self._placed("rollout"), strict=True
        ):
            expected = model.sync_cost(problem, few, rollout, "hybrid")
            assert model.sync_cost(problem, many, rollout, "hybrid") == expected


class _Prices(BaseCostModel):
    """A cost model with work divided by devices, a fixed time per micro-batch, and memory divided by sharding."""

    def stage_cost(self, problem: Problem, stage: StageSpec, placement: Placement, pool: Pool, mode: Mode) -> StageCost:
        """Return the work of the stage divided by the pool's devices."""
        work = {"generate": 8.0, "forward": 1.0, "update": 4.0}[stage.kind]
        passes = -(-problem.rows // (placement.mesh.data * placement.micro_batch_rows))
        wire = 0.1 * (placement.mesh.tensor - 1) + 0.2 * (len(pool.places) - 1)
        return StageCost(compute=work / pool.devices, memory=0.01 * passes, communication=wire)

    def memory(self, problem: Problem, role: RoleSpec, placement: Placement, pool: Pool, mode: Mode) -> MemoryParts:
        """Return weights and optimizer state divided by the model-parallel ranks."""
        numbers = role.model.parameters // (placement.mesh.tensor * placement.mesh.pipeline)
        trained = role.kind == "trains"
        rows = placement.micro_batch_rows * 10**8
        return MemoryParts(2 * numbers, 4 * numbers * trained, 12 * numbers * trained, activations=rows)

    def sync_cost(
        self, problem: Problem, trained: tuple[Placement, Pool], rollout: tuple[Placement, Pool], mode: Mode
    ) -> StageCost:
        """Return a cost that is higher between different pools."""
        return StageCost(communication=0.1 if mode == "hybrid" else 0.3)

    def switch_cost(self, problem: Problem, role: RoleSpec, placement: Placement, pool: Pool, mode: Mode) -> StageCost:
        """Return 0, because no role is offloaded."""
        return StageCost()


class PlannerSuite:
    """Conformance tests of one planner; subclass it and set the name.

    Attributes:
        name: name of the planner in ``rollcast.planners``.
        constraints: constraints to test one after the other; remove those that no mapping of the planner can satisfy.
    """

    name: ClassVar[str] = ""
    constraints: ClassVar[tuple[Constraints, ...]] = (
        Constraints(),
        Constraints(pinned={"critic": 1}),
        Constraints(forbidden=(("actor", "critic"),)),
        Constraints(together=(("actor", "critic"),)),
        Constraints(headroom=0.3),
        Constraints(modes=("hybrid",)),
        Constraints(modes=("colocated", "standalone")),
    )

    def build(self) -> BasePlanner:
        """Build a planner; override it for one that is not registered."""
        return planners.get(self.name)()

    def _plan(self, problem: Problem, count: int = 4) -> list[Prediction]:
        return list(self.build().plan(problem, _Prices(CostModelConfig()), count))

    def test_the_best_come_first(self) -> None:
        """Check that mappings are sorted by step time, and that there are no more than requested."""
        seconds = [prediction.step_seconds for prediction in self._plan(small_problem(2))]
        assert 1 <= len(seconds) <= 4
        assert seconds == sorted(seconds)
        assert self._plan(small_problem(2), 1)[0].step_seconds == seconds[0]

    def test_equal_problems_have_equal_mappings(self) -> None:
        """Check that a search is deterministic."""
        first = [prediction.mapping for prediction in self._plan(small_problem(2))]
        assert [prediction.mapping for prediction in self._plan(small_problem(2))] == first

    def test_mappings_are_whole_and_obey_the_constraints(self) -> None:
        """Check that each role has one placement, meshes fill disjoint pools, and memory and constraints are met."""
        for limits in self.constraints:
            problem = small_problem(2, limits)
            for prediction in self._plan(problem):
                self._check(problem, prediction)

    def _check(self, problem: Problem, prediction: Prediction) -> None:
        limits, mapping = problem.constraints, prediction.mapping
        pools = {pool.name: pool for pool in mapping.pools}
        homes = {placement.role: placement.pool for placement in mapping.placements}
        assert len(pools) == len(mapping.pools)
        assert sorted(homes) == sorted(role.name for role in problem.roles)
        assert len(mapping.placements) == len(homes)
        assert all(placement.mesh.size == pools[placement.pool].devices for placement in mapping.placements)
        assert all(placement.micro_batch_rows >= 1 for placement in mapping.placements)
        used: Counter[int] = Counter()
        for pool in mapping.pools:
            used.update(dict(pool.places))
            room = min(problem.cluster.nodes[node].kind.memory_bytes for node, _ in pool.places)
            assert prediction.device_bytes[pool.name] <= room * (1 - limits.headroom)
        assert all(count <= problem.cluster.nodes[node].devices for node, count in used.items())
        assert all(pools[homes[role]].devices == count for role, count in limits.pinned.items())
        assert all(homes[one] != homes[other] for one, other in limits.forbidden)
        assert all(homes[one] == homes[other] for one, other in limits.together)
        assert mapping.max_staleness <= limits.max_staleness
        assert mapping.mode in limits.modes

    def test_what_fits_nowhere_is_refused(self) -> None:
        """Check that a cluster with too little memory raises ResourceError."""
        tiny = replace(_DEVICE, memory_bytes=10**6)
        problem = replace(small_problem(2), cluster=Cluster((Node(tiny, 2, 1e11),), 1e10))
        with pytest.raises(ResourceError):
            self._plan(problem)
