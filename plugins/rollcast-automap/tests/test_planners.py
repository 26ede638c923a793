"""Planners against the exhaustive oracle.

All 500 problems (20 minutes on one core): ``python plugins/rollcast-automap/tests/test_planners.py 500``.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace

import pytest

from rollcast.errors import ResourceError
from rollcast_automap.contract import (
    BaseCostModel,
    Cluster,
    Constraints,
    CostModelConfig,
    DeviceKind,
    Lengths,
    MemoryParts,
    Mode,
    ModelFacts,
    Node,
    Placement,
    Pool,
    Problem,
    RoleSpec,
    StageCost,
    StageSpec,
)
from rollcast_automap.costs.analytical import AnalyticalConfig, AnalyticalCosts
from rollcast_automap.search.planners import BranchAndBound, Exhaustive, HybridFlow

FAST = DeviceKind("fast", 80 * 10**9, {"bfloat16": 1e15}, 3e12, 5e10)
SLOW = DeviceKind("slow", 40 * 10**9, {"bfloat16": 3e14}, 1.5e12, 2.5e10)


class Synthetic(BaseCostModel):
    """A cheap model with a trade-off in every dimension of a placement."""

    def stage_cost(self, problem: Problem, stage: StageSpec, placement: Placement, pool: Pool, mode: Mode) -> StageCost:
        """Arithmetic over devices, a latency per micro-batch, collectives by tensor size, a pipeline bubble, a tail."""
        role, mesh = problem.role(stage.role), placement.mesh
        speed = min(problem.cluster.nodes[node].kind.flops["bfloat16"] for node, _ in pool.places) / 2
        work = {"generate": 12.0, "forward": 2.0, "update": 6.0}[stage.kind] * role.model.parameters * problem.tokens
        compute = work / (speed * mesh.size)
        passes = -(-problem.rows // (mesh.data * placement.micro_batch_rows))
        across = 4.0 if len(pool.places) > 1 else 1.0
        return StageCost(
            compute=compute,
            memory=2e-3 * passes,
            communication=compute * 0.05 * (mesh.tensor - 1) + 0.01 * across * (mesh.data - 1),
            bubble=compute * (mesh.pipeline - 1) / passes,
            tail=0.4 + 0.02 * mesh.data if stage.kind == "generate" else 0.0,
        )

    def memory(self, problem: Problem, role: RoleSpec, placement: Placement, pool: Pool, mode: Mode) -> MemoryParts:
        """Weights over the model-parallel ranks, activations by the rows of a micro-batch."""
        mesh = placement.mesh
        mine = role.model.parameters // (mesh.tensor * mesh.pipeline)
        trains = role.kind == "trains"
        return MemoryParts(
            parameters=2 * mine,
            gradients=2 * mine * trains,
            optimizer=12 * mine // mesh.data * trains,
            activations=placement.micro_batch_rows * 10**8 // mesh.tensor,
            reserve=10**9,
            visiting=frozenset({"parameters"}) if role.kind == "generates" and mode == "hybrid" else frozenset(),
            own_process=role.own_process,
        )

    def sync_cost(
        self, problem: Problem, trained: tuple[Placement, Pool], rollout: tuple[Placement, Pool], mode: Mode
    ) -> StageCost:
        """Resharding is free between equal tensor sizes."""
        equal = trained[0].mesh.tensor == rollout[0].mesh.tensor
        return StageCost(communication=(0.05 if equal else 0.3) * (1 if mode == "hybrid" else 2))

    def switch_cost(self, problem: Problem, role: RoleSpec, placement: Placement, pool: Pool, mode: Mode) -> StageCost:
        """A rollout that takes turns is loaded and released."""
        return StageCost(memory=0.2 if role.kind == "generates" and mode == "hybrid" else 0.0)


def facts(parameters: float) -> ModelFacts:
    return ModelFacts(32, 4096, 32, 8, 11008, 32000, int(parameters), 128)


ROLES = {
    "actor": ("trains", ("update_actor", "update", ("ref_log_prob", "values"))),
    "rollout": ("generates", ("generate", "generate", ())),
    "ref": ("forwards", ("ref_log_prob", "forward", ("generate",))),
    "critic": ("trains", ("values", "forward", ("generate",))),
}


def make_problem(sizes: dict[str, float], cluster: Cluster, **limits: object) -> Problem:
    roles = [RoleSpec(name, ROLES[name][0], facts(size), "any") for name, size in sizes.items()]  # type: ignore[arg-type]
    order = [name for name in ("rollout", "ref", "critic", "actor") if name in sizes]
    stages: list[StageSpec] = []
    for name in order:
        stage, kind, waits = ROLES[name][1]
        known = {each.name for each in stages}
        stages.append(StageSpec(stage, name, kind, tuple(each for each in waits if each in known) or tuple(known)))  # type: ignore[arg-type]
    if "critic" in sizes:
        stages.append(StageSpec("update_critic", "critic", "update", ("values",)))
    return Problem(
        tuple(roles),
        tuple(stages),
        prompts=8,
        samples=2,
        mini_batches=1,
        epochs=1,
        prompt_lengths=Lengths(300, 512),
        response_lengths=Lengths(700, 2048),
        cluster=cluster,
        constraints=Constraints(**limits),  # type: ignore[arg-type]
    )


def nodes(count: int, devices: int = 8, kind: DeviceKind = FAST) -> tuple[Node, ...]:
    return (Node(kind, devices, 4.5e11),) * count


def draw_problem(seed: int, most: int = 16) -> Problem:
    """Return a random problem of two to four roles on up to ``most`` devices of one or two kinds, with random limits."""
    drawn = random.Random(seed)
    count = drawn.choice((2, 3, 4, 4, 4))
    names = ("actor", "rollout", "ref", "critic")[:count]
    devices = drawn.choice([size for size in (2, 3, 4, 6, 8, 12, 16, 16) if size <= most])
    width = drawn.choice([size for size in (2, 4, 8) if devices % size == 0] or [devices])
    cuts = devices // width
    fast = drawn.randint(0, cuts) if drawn.random() < 0.4 else cuts
    parts = (Node(FAST, width, 4.5e11),) * fast + (Node(SLOW, width, 2e11),) * (cuts - fast)
    limits: dict[str, object] = {
        "max_staleness": drawn.choice((0, 1, 3)),
        "headroom": drawn.choice((0.05, 0.05, 0.3)),
        "pinned": {drawn.choice(names): drawn.randint(1, max(devices // 2, 1))} if drawn.random() < 0.15 else {},
        "forbidden": ((names[0], names[-1]),) if drawn.random() < 0.15 else (),
        "together": ((names[0], names[-1]),) if drawn.random() < 0.15 else (),
    }
    if drawn.random() < 0.2:
        limits["modes"] = drawn.choice((("hybrid",), ("colocated", "standalone"), ("standalone",)))
    sizes = {name: drawn.choice((5e8, 2e9, 7e9)) for name in names}
    problem = make_problem(sizes, Cluster(parts, drawn.choice((3e9, 5e10))), **limits)
    plugin, offload = drawn.choice(("fsdp", "megatron")), drawn.random() < 0.2
    roles = [replace(role, plugin=plugin, offload=offload and role.kind != "generates") for role in problem.roles]
    return replace(
        problem,
        roles=tuple(roles),
        prompts=drawn.choice((4, 8, 16)),
        mini_batches=drawn.choice((1, 2, 4)),
        response_lengths=Lengths(drawn.choice((200, 700)), 2048),
    )


def compare(seed: int, most: int = 16) -> float | None:
    """Return the found step time over the oracle's; None if nothing fits, for both. Odd seeds have analytical costs."""
    problem = draw_problem(seed, most)
    costs = AnalyticalCosts(AnalyticalConfig()) if seed % 2 else Synthetic(CostModelConfig())
    try:
        oracle = Exhaustive().plan(problem, costs)[0].step_seconds
    except ResourceError:
        with pytest.raises(ResourceError):
            BranchAndBound().plan(problem, costs)
        return None
    return BranchAndBound().plan(problem, costs)[0].step_seconds / oracle


def test_branch_and_bound_finds_the_oracles_cost() -> None:
    ratios = [ratio for seed in range(24) if (ratio := compare(seed, 6)) is not None]
    assert len(ratios) >= 12
    assert max(ratios) <= 1 + 1e-9
    assert min(ratios) >= 1 - 1e-9


def test_planners_are_deterministic_and_list_the_best_first() -> None:
    problem = make_problem({"actor": 7e9, "rollout": 7e9, "ref": 7e9}, Cluster(nodes(2), 5e10), max_staleness=1)
    first = BranchAndBound().plan(problem, Synthetic(CostModelConfig()), 3)
    assert first == BranchAndBound().plan(problem, Synthetic(CostModelConfig()), 3)
    assert [each.step_seconds for each in first] == sorted(each.step_seconds for each in first)
    assert HybridFlow().plan(problem, Synthetic(CostModelConfig()))[0].step_seconds >= first[0].step_seconds


def test_constraints_hold() -> None:
    problem = make_problem(
        {"actor": 7e9, "rollout": 7e9, "ref": 7e9},
        Cluster(nodes(1), 5e10),
        forbidden=(("actor", "ref"),),
        pinned={"ref": 2},
    )
    found = BranchAndBound().plan(problem, Synthetic(CostModelConfig()))[0].mapping
    homes = {each.role: each.pool for each in found.placements}
    sizes = {pool.name: pool.devices for pool in found.pools}
    assert homes["actor"] != homes["ref"]
    assert sizes[homes["ref"]] == 2


def test_a_model_that_fits_nowhere_is_refused() -> None:
    problem = make_problem({"actor": 7e11, "rollout": 7e11}, Cluster(nodes(1), 5e10))
    with pytest.raises(ResourceError, match="no mapping of actor, rollout fits 8 devices"):
        BranchAndBound().plan(problem, Synthetic(CostModelConfig()))


if __name__ == "__main__":
    found = [compare(number) for number in range(int(sys.argv[1]))]
    for name, some in (("synthetic", found[::2]), ("analytical", found[1::2])):
        ratios = [ratio for ratio in some if ratio is not None]
        equal = sum(ratio <= 1 + 1e-9 for ratio in ratios)
        sys.stdout.write(
            f"{name}: {len(some)} problems, {len(ratios)} with a mapping, {equal} equal, "
            f"from {min(ratios):.6f} to {max(ratios):.6f}\n"
        )
