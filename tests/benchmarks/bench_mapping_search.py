"""The search of `rollcast map` with the cost model `analytical`, against the goals of 1 s and 10 s on one core.

Four roles, and five with a reward model, of a model with 7B parameters on H100 clusters of one kind, and on halves of
H100 and A100. The table has the median of three searches; the report compares four roles on one kind with the goals.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path

from _report import Comparison, write_report
from rich.console import Console
from rich.table import Table

from rollcast_automap.contract import (
    Cluster,
    Constraints,
    Lengths,
    ModelFacts,
    Node,
    Prediction,
    Problem,
    RoleSpec,
    StageSpec,
)
from rollcast_automap.costs.analytical import AnalyticalConfig, AnalyticalCosts
from rollcast_automap.costs.clusters import DEVICE_KINDS
from rollcast_automap.search.planners import BranchAndBound

#: Sizes of Qwen2.5-7B.
MODEL = ModelFacts(28, 3584, 28, 4, 18944, 152064, 7_615_616_512, 128)
#: Devices → seconds that a search may take.
GOALS = {128: 1.0, 1024: 10.0}


def ppo(devices: int, roles: int, staleness: int, *, is_mixed: bool) -> Problem:
    """Return a PPO step; the fifth role is a reward model."""
    forwards = ("actor", "critic", "ref", "reward_model")[: roles - 1]
    specs = [RoleSpec("rollout", "generates", MODEL, "vllm")]
    specs += [
        RoleSpec(name, "trains" if name in ("actor", "critic") else "forwards", MODEL, "megatron", value_head=head)
        for name, head in (("actor", False), ("critic", True), ("ref", False), ("reward_model", True))
        if name in forwards
    ]
    prepared = tuple(f"{name}_forward" for name in forwards)
    stages = [StageSpec("rollout", "rollout", "generate")]
    stages += [StageSpec(f"{name}_forward", name, "forward", ("rollout",)) for name in forwards]
    stages += [StageSpec(f"{name}_update", name, "update", ("rollout", *prepared)) for name in ("critic", "actor")]
    kinds = [("h100", 450e9), ("a100", 300e9)] if is_mixed else [("h100", 450e9)]
    nodes = [Node(DEVICE_KINDS[kind], 8, link) for kind, link in kinds for _ in range(devices // 8 // len(kinds))]
    return Problem(
        tuple(specs),
        tuple(stages),
        prompts=512,
        samples=8,
        mini_batches=4,
        epochs=1,
        prompt_lengths=Lengths(512, 1024),
        response_lengths=Lengths(1024, 4096),
        cluster=Cluster(tuple(nodes), 25e9),
        constraints=Constraints(max_staleness=staleness),
    )


def search(problem: Problem, repeats: int) -> tuple[float, Prediction]:
    """Return the median seconds of a search for three mappings, and the best of them."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        found = BranchAndBound().plan(problem, AnalyticalCosts(AnalyticalConfig()), 3)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken), found[0]


def main() -> None:
    """Run the searches, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/mapping_search.json"))
    options = parser.parse_args()
    table = Table(title="search of rollcast map")
    for title in ("devices", "kinds", "roles", "--staleness", "search (s)", "step (s)", "mode", "pools"):
        table.add_column(title, justify="right")
    comparisons = []
    for devices, roles, staleness, is_mixed in itertools.product(GOALS, (4, 5), (0, 1, 4), (False, True)):
        seconds, best = search(ppo(devices, roles, staleness, is_mixed=is_mixed), options.repeats)
        sizes = " + ".join(str(pool.devices) for pool in best.mapping.pools)
        case = (str(devices), "2" if is_mixed else "1", str(roles), str(staleness))
        table.add_row(*case, f"{seconds:.2f}", f"{best.step_seconds:.2f}", best.mapping.mode, sizes)
        if roles == 4 and not is_mixed:
            name = f"seconds, {devices} devices, --staleness {staleness}"
            comparisons.append(Comparison(name, seconds, GOALS[devices], at_most=1.0))
    Console().print(table)
    notes = [f"four roles, devices of one kind, median of {options.repeats} searches for three mappings"]
    write_report("search of a mapping (ours) against the goal (other)", comparisons, notes, options.output)


if __name__ == "__main__":
    main()
