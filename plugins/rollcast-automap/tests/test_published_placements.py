"""HybridFlow's placements: which of them the planner and the analytical cost model find again.

The setting is the paper's (EuroSys 2025, arXiv 2409.19256, section 8): machines of 8 A100-80GB that share 200 Gbps, PPO
with 1,024 prompts, prompts and responses of 1,024 tokens, 8 optimizer steps; the rollout returns the log-probs of the
actor (Table 1 counts six computations, and none of them is a forward pass of the actor).

The table of `docs/mapping.md`: ``python plugins/rollcast-automap/tests/test_published_placements.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

from rollcast.errors import ResourceError
from rollcast_automap.contract import (
    Cluster,
    Constraints,
    Lengths,
    Mesh,
    ModelFacts,
    Node,
    Prediction,
    Problem,
    RoleSpec,
    StageSpec,
)
from rollcast_automap.costs.analytical import AnalyticalConfig, AnalyticalCosts
from rollcast_automap.costs.clusters import DEVICE_KINDS
from rollcast_automap.search.planners import HybridFlow

#: Sizes of Llama models.
MODELS = {
    "13b": ModelFacts(40, 5120, 40, 40, 13824, 32000, 13_015_864_320, 128),
    "34b": ModelFacts(48, 8192, 64, 8, 22016, 32000, 33_743_970_304, 128),
    "70b": ModelFacts(80, 8192, 64, 8, 28672, 32000, 68_976_648_192, 128),
}
FORWARDS = ("critic", "ref", "reward_model")
Groups = tuple[tuple[str, ...], ...]
COLOCATE: Groups = (("actor", "critic", "ref", "reward_model"),)
SPLIT: Groups = (("actor", "ref"), ("critic", "reward_model"))
STANDALONE: Groups = (("actor",), ("critic",), ("ref",), ("reward_model",))
LARGE_CRITIC: Groups = (("actor", "ref", "reward_model"), ("critic",))
#: Training parallelism of the paper's Figure 15: 8 tensor-parallel ranks, the rest data-parallel, no pipeline.
PAPER_MESHES = tuple(Mesh(data=data, tensor=8) for data in range(1, 17))


def ppo(model: str, devices: int, critic: str | None = None, *, is_papers_mesh: bool = False) -> Problem:
    """Return the paper's problem; ``critic`` is the size of critic and reward model, if it is another one."""
    facts, theirs = MODELS[model], MODELS[critic or model]
    roles = (
        RoleSpec("rollout", "generates", facts, "vllm"),
        RoleSpec("actor", "trains", facts, "megatron"),
        RoleSpec("critic", "trains", theirs, "megatron", value_head=True),
        RoleSpec("ref", "forwards", facts, "megatron"),
        RoleSpec("reward_model", "forwards", theirs, "megatron", value_head=True),
    )
    prepared = tuple(f"{name}_forward" for name in FORWARDS)
    stages = (
        StageSpec("rollout", "rollout", "generate"),
        *(StageSpec(f"{name}_forward", name, "forward", ("rollout",)) for name in FORWARDS),
        *(StageSpec(f"{name}_update", name, "update", ("rollout", *prepared)) for name in ("critic", "actor")),
    )
    # The devices of a machine share its 200 Gbps.
    cluster = Cluster((Node(DEVICE_KINDS["a100"], 8, 300e9),) * (devices // 8), 200e9 / 8 / 8)
    limits = Constraints(
        together=(("rollout", "actor"),),
        meshes=dict.fromkeys(("actor", "critic"), PAPER_MESHES) if is_papers_mesh else {},
    )
    return Problem(roles, stages, 1024, 1, 8, 1, Lengths(1024, 1024), Lengths(1024, 1024), cluster, limits)


def plan(problem: Problem, groups: Groups = (), sizes: Sequence[int] = ()) -> Prediction:
    """Return the best mapping, or the best one with these roles together and these numbers of devices."""
    limits = problem.constraints
    together = [(group[0], role) for group in groups for role in group[1:]]
    forbidden = [(one[0], other[0]) for place, one in enumerate(groups) for other in groups[place + 1 :]]
    pinned = {group[0]: size for group, size in zip(groups, sizes, strict=False)}
    limits = replace(
        limits, together=(*limits.together, *together), forbidden=tuple(forbidden), pinned={**limits.pinned, **pinned}
    )
    (found,) = HybridFlow().plan(replace(problem, constraints=limits), AnalyticalCosts(AnalyticalConfig()))
    return found


def pools(found: Prediction) -> dict[frozenset[str], int]:
    """Return the roles of each pool without the rollout → number of its devices."""
    roles: dict[str, set[str]] = {pool.name: set() for pool in found.mapping.pools}
    for each in found.mapping.placements:
        roles[each.pool] |= {each.role} - {"rollout"}
    return {frozenset(roles[pool.name]): pool.devices for pool in found.mapping.pools}


@pytest.mark.parametrize(
    ("model", "devices", "is_papers_mesh"),
    [
        ("13b", 16, False),
        ("13b", 32, False),
        ("13b", 64, False),
        ("34b", 64, False),
        ("13b", 16, True),
        ("13b", 32, True),
    ],
)
def test_colocation_wins_on_few_devices(model: str, devices: int, is_papers_mesh: bool) -> None:
    found = plan(ppo(model, devices, is_papers_mesh=is_papers_mesh))
    assert pools(found) == {frozenset(COLOCATE[0]): devices}


def test_a_larger_critic_is_colocated_on_few_devices() -> None:
    assert pools(plan(ppo("13b", 64, "70b"))) == {frozenset(COLOCATE[0]): 64}


def test_actor_and_critic_are_apart_on_many_devices() -> None:
    found = pools(plan(ppo("34b", 128)))
    assert sorted(found.values()) == [64, 64]
    assert not any({"actor", "critic"} <= roles for roles in found)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("model", "devices"), [("13b", 96), ("34b", 96), ("34b", 128)])
def test_a_split_wins_on_many_devices_with_the_papers_parallelism(model: str, devices: int) -> None:
    problem = ppo(model, devices, is_papers_mesh=True)
    split = plan(problem, SPLIT)
    assert set(pools(split).values()) == {devices // 2}
    assert split.step_seconds < min(plan(problem, groups).step_seconds for groups in (COLOCATE, STANDALONE))
    # The best mapping of all parts actor and critic too; where the reward model is makes 1 % at most.
    best = plan(problem)
    assert not any({"actor", "critic"} <= roles for roles in pools(best))
    assert split.step_seconds <= 1.02 * best.step_seconds


def _parts(problem: Problem, found: Prediction) -> list[str]:
    """Return the seconds of generation, preparation and training, and the parts of the slowest pool in training."""
    homes = {each.role: each.pool for each in found.mapping.placements}
    cells = []
    for kind in ("generate", "forward", "update"):
        stages = [stage for stage in problem.stages if stage.kind == kind]
        by_pool = {
            pool: [found.stages[stage.name] for stage in stages if homes[stage.role] == pool] for pool in homes.values()
        }
        slowest = max(by_pool.values(), key=lambda costs: sum(cost.seconds for cost in costs))
        cells.append(f"{sum(cost.seconds for cost in slowest):.1f}")
    cells.append(f"{sum(cost.compute + cost.memory for cost in slowest):.1f}")
    cells.append(f"{sum(cost.communication for cost in slowest):.1f}")
    return [*cells, f"{sum(cost.bubble for cost in slowest):.1f}"]


def _describe(found: Prediction) -> str:
    meshes = {each.role: each.mesh for each in found.mapping.placements}
    texts = []
    for roles, devices in pools(found).items():
        names = [
            f"{role} {meshes[role].data}x{meshes[role].tensor}x{meshes[role].pipeline}"
            for role in ("actor", "critic", "ref", "reward_model")
            if role in roles
        ]
        texts.append(f"{', '.join(names)} on {devices}")
    return "; ".join(texts)


def main() -> None:
    """Write the table of the cases: the best mapping, and the paper's."""
    cases = [("13b", None, devices, COLOCATE, ()) for devices in (16, 32, 64)]
    cases += [("13b", None, 96, SPLIT, (48, 48)), ("13b", None, 128, STANDALONE, (64, 32, 16, 16))]
    cases += [("34b", None, devices, SPLIT, (devices // 2,) * 2) for devices in (96, 128)]
    cases += [("13b", "70b", 64, COLOCATE, ()), ("13b", "70b", 128, LARGE_CRITIC, (64, 64))]
    titles = "| case | meshes | | step | generation | preparation | training | arithmetic | communication | bubble | mapping |"
    sys.stdout.write(f"{titles}\n|{'---|' * 11}\n")
    for model, critic, devices, groups, sizes in cases:
        for is_papers_mesh in (False, True):
            problem = ppo(model, devices, critic, is_papers_mesh=is_papers_mesh)
            start = [f"{model}{f' and {critic}' if critic else ''} on {devices}", "paper" if is_papers_mesh else "any"]
            for name, given in (("best", ((), ())), ("paper", (groups, sizes))):
                try:
                    found = plan(problem, *given)
                except ResourceError:
                    cells = [*start, name, "fits no memory", *[""] * 7]
                else:
                    cells = [*start, name, f"{found.step_seconds:.1f}", *_parts(problem, found), _describe(found)]
                sys.stdout.write(f"| {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
