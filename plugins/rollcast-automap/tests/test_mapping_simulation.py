"""A mapping on a simulated clock: laws of the simulation, and the closed form held against it.

All 200 problems: ``python plugins/rollcast-automap/tests/test_mapping_simulation.py 200``.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections import defaultdict

from rollcast.contracts.mapping import (
    Cluster,
    Lengths,
    Mapping,
    Mesh,
    ModelFacts,
    Node,
    Placement,
    Pool,
    Problem,
    RoleSpec,
    StageSpec,
)
from rollcast_automap.analytical import AnalyticalConfig, AnalyticalCosts
from rollcast_automap.clusters import DEVICE_KINDS
from rollcast_automap.composition import predict
from rollcast_automap.length_curve import LengthCurve
from rollcast_automap.mapping_simulation import simulate_mapping

COSTS = AnalyticalCosts(AnalyticalConfig())
MODELS = (
    ModelFacts(24, 1024, 16, 8, 2816, 151936, 494_000_000, 64, tied=True),
    ModelFacts(32, 4096, 32, 8, 14336, 128256, 8_030_000_000, 128),
    ModelFacts(64, 5120, 40, 8, 27648, 152064, 32_800_000_000, 128),
)


def draw_lengths(drawn: random.Random, kind: str) -> Lengths:
    """Return responses with a mean of 200 to 3,000 tokens: all equal, exponential, or log-normal with a long tail."""
    mean = drawn.choice((200.0, 800.0, 3000.0))
    if kind == "fixed":
        return Lengths(mean, int(mean))
    if kind == "exponential":
        return Lengths(mean, int(mean * drawn.choice((2, 4, 10))))
    most = int(mean * 20)
    samples = [min(mean * drawn.lognormvariate(-0.5, 1.0), float(most)) for _ in range(2000)]
    return LengthCurve.from_samples(samples).statistics(most)


def draw_mapping(seed: int) -> tuple[str, Problem, Mapping]:
    """Return a random problem on 2 to 16 H100 with a random mapping, and the name of its case."""
    drawn = random.Random(seed)
    kind, way = drawn.choice(("fixed", "exponential", "heavy tail")), drawn.choice(("hybrid", "standalone", "ahead"))
    model, critic = drawn.choice(MODELS), drawn.random() < 0.5
    names = ["actor", "ref", *(["critic"] if critic else [])]
    roles = [
        RoleSpec(name, "forwards" if name == "ref" else "trains", model, "fsdp", value_head=name == "critic")
        for name in names
    ]
    roles.insert(1, RoleSpec("rollout", "generates", model, "vllm", own_process=True))
    forwards = [
        StageSpec("old_log_prob", "actor", "forward", ("rollout",)),
        StageSpec("ref", "ref", "forward", ("rollout",)),
    ]
    forwards += [StageSpec("values", "critic", "forward", ("rollout",))] if critic else []
    before = ("rollout", *(each.name for each in forwards))
    updates = [StageSpec("update_critic", "critic", "update", before)] if critic else []
    stages = (
        StageSpec("rollout", "rollout", "generate"),
        *forwards,
        *updates,
        StageSpec("update_actor", "actor", "update", (*before, *(each.name for each in updates))),
    )
    size = drawn.choice((1, 2, 4, 8))
    node = Node(DEVICE_KINDS["h100"], 16, 450e9)
    problem = Problem(
        tuple(roles),
        stages,
        prompts=drawn.choice((8, 16, 32)),
        samples=drawn.choice((4, 8)),
        mini_batches=1,
        epochs=1,
        prompt_lengths=Lengths(256.0, 512),
        response_lengths=draw_lengths(drawn, kind),
        cluster=Cluster((node,), 50e9),
    )
    homes = dict.fromkeys(names, "train") | {"rollout": "train" if way == "hybrid" else "rollouts"}
    if critic and drawn.random() < 0.5:
        homes["critic"] = "critic"
    sizes = {home: size if home != "rollouts" else drawn.choice((1, 2, 4, 8)) for home in dict.fromkeys(homes.values())}
    tensor = drawn.choice([each for each in (1, 2, 4) if each <= sizes[homes["rollout"]]])
    data = sizes[homes["rollout"]] // tensor
    rows = -(-problem.rows // data)
    slots = drawn.choice([each for each in (4, 16, 64, 256) if each < rows] + [rows])
    placements = [
        Placement(
            name,
            home,
            Mesh(data, tensor) if name == "rollout" else Mesh(data=sizes[home]),
            slots if name == "rollout" else 4,
        )
        for name, home in homes.items()
    ]
    pools = tuple(Pool(home, ((0, count),)) for home, count in sizes.items())
    mode = "hybrid" if way == "hybrid" else "standalone"
    return f"{way}, {kind}", problem, Mapping(pools, tuple(placements), mode, int(way == "ahead"))


def error(seed: int, seeds: int = 4, steps: int = 4) -> tuple[str, float]:
    """Return the case of a random problem, and the predicted over the simulated step time - 1."""
    case, problem, mapping = draw_mapping(seed)
    predicted = predict(problem, COSTS, mapping).step_seconds
    runs = [simulate_mapping(problem, mapping, COSTS, steps, each).step_seconds for each in range(seeds)]
    return case, predicted / statistics.fmean(runs) - 1


if __name__ == "__main__":
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(int(sys.argv[1])):
        case, off = error(number)
        found[case].append(off)
        found["all"].append(off)
    for case, errors in sorted(found.items()):
        sizes = sorted(map(abs, errors))
        sys.stdout.write(
            f"{case}: {len(errors)} problems, median error {statistics.median(sizes):.1%}, 90th percentile "
            f"{sizes[int(0.9 * (len(sizes) - 1))]:.1%}, largest {max(errors, key=abs):+.1%}\n"
        )
