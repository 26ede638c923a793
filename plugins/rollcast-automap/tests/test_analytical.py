"""The cost model ``analytical``: lengths, parts, and a published table of throughputs."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest

from rollcast_automap.contract import (
    Cluster,
    DeviceKind,
    Lengths,
    Mesh,
    ModelFacts,
    Node,
    Placement,
    Pool,
    Problem,
    RoleSpec,
    StageSpec,
)
from rollcast_automap.costs.analytical import AnalyticalConfig, AnalyticalCosts
from rollcast_automap.costs.length_curve import LengthCurve

A100 = DeviceKind("a100", 80 << 30, {"bfloat16": 312e12}, 2.039e12, 32e9)
UPDATE = StageSpec("update_actor", "actor", "update")
GENERATE = StageSpec("rollout", "rollout", "generate")
#: MosaicML llm-foundry, scripts/train/benchmarking/README.md, A100 80GB, 1,600 Gbps between nodes, FSDP over all GPUs:
#: layers, hidden, tokens a row, GPUs, rows of a micro-batch, rows of a batch, checkpointing, tokens/s of a GPU.
PUBLISHED = [
    (80, 8192, 2048, 64, 8, 2048, True, 410),
    (48, 7168, 8192, 8, 1, 168, True, 574),
    (48, 7168, 2048, 8, 3, 504, True, 916),
    (48, 7168, 512, 8, 12, 2016, True, 967),
    (40, 5120, 8192, 8, 5, 120, True, 1795),
    (40, 5120, 2048, 8, 2, 48, False, 2262),
    (40, 5120, 1024, 8, 40, 960, True, 2330),
    (32, 4096, 32768, 8, 2, 32, True, 1672),
    (32, 4096, 2048, 8, 6, 96, False, 4641),
    (32, 4096, 1024, 8, 64, 1024, True, 4357),
    (32, 2560, 2048, 8, 10, 160, False, 10811),
    (24, 2048, 2048, 8, 14, 448, False, 20513),
]


def mpt(layers: int, hidden: int) -> ModelFacts:
    parameters = 12 * layers * hidden * hidden + 50368 * hidden
    # A feed-forward part of two matrices has as many weights as one of three with two thirds of the width.
    return ModelFacts(layers, hidden, 32, 32, round(8 * hidden / 3), 50368, parameters, hidden // 32, tied=True)


def problem(model: ModelFacts, devices: int, rows: int, response: Lengths, *, recompute: bool = True) -> Problem:
    node = Node(A100, min(devices, 8), 300e9)
    roles = (
        RoleSpec("actor", "trains", model, "fsdp", recompute=recompute),
        RoleSpec("rollout", "generates", model, "vllm"),
    )
    return Problem(
        roles,
        (GENERATE, UPDATE),
        rows,
        1,
        1,
        1,
        Lengths(0.0, 0),
        response,
        Cluster((node,) * math.ceil(devices / 8), 25e9),
    )


def pool(devices: int) -> Pool:
    return Pool("p", tuple((place, min(devices, 8)) for place in range(math.ceil(devices / 8))))


def throughput_errors(costs: AnalyticalCosts, rows_of_table: list[tuple[int, ...]]) -> list[float]:
    """Return predicted throughput / published throughput - 1 of each row."""
    errors = []
    for layers, hidden, tokens, devices, micro, rows, recompute, published in rows_of_table:
        asked = problem(mpt(layers, hidden), devices, rows, Lengths(tokens, tokens), recompute=bool(recompute))
        at = Placement("actor", "p", Mesh(data=devices), micro)
        cost = costs.stage_cost(asked, UPDATE, at, pool(devices), "hybrid")
        errors.append(rows * tokens / cost.seconds / devices / published - 1)
    return errors


def test_published_training_throughput_is_predicted() -> None:
    """The constants were fitted on the table's even rows; the odd ones are held out."""
    errors = [abs(error) for error in throughput_errors(AnalyticalCosts(AnalyticalConfig()), PUBLISHED[1::2])]
    assert statistics.median(errors) <= 0.15, errors
    # The table's own rate falls by 30 % from 4,096 to 8,192 tokens a row for 30B on 8 devices, not for 13B; the model
    # has no cause for that, and is 41 % too fast there. The next worst held-out row is off by 18 %.
    assert sorted(errors)[-2] <= 0.20, errors
    assert max(errors) <= 0.45, errors


def test_curve_has_the_moments_and_the_longest_of_its_samples() -> None:
    curve = LengthCurve((0.0, 0.5, 0.9, 1.0), (1.0, 200.0, 600.0, 2000.0))
    drawn = [curve.draw(64, seed) for seed in range(2000)]
    every = [length for batch in drawn for length in batch]
    assert curve.mean == pytest.approx(statistics.fmean(every), rel=0.02)
    assert curve.mean_square == pytest.approx(statistics.fmean(length**2 for length in every), rel=0.03)
    assert curve.expected_longest(64) == pytest.approx(statistics.fmean(max(batch) for batch in drawn), rel=0.01)
    assert curve.surviving(600.0) == pytest.approx(0.1)
    assert curve.remaining(0.0) == pytest.approx(1.0)
    assert LengthCurve.fixed(100.0).remaining(25.0) == pytest.approx(0.75)


def test_a_problem_keeps_the_ends_of_measured_lengths() -> None:
    curve = LengthCurve.from_samples([2.0, 2.0, 3.0, 7.0])
    assert LengthCurve.read(curve.statistics(1024)) == curve


def test_unequal_lengths_make_a_tail() -> None:
    model, at = mpt(32, 4096), Placement("rollout", "p", Mesh(data=8), 64)
    equal = AnalyticalCosts(AnalyticalConfig()).stage_cost(
        problem(model, 8, 256, Lengths(500, 500)), GENERATE, at, pool(8), "hybrid"
    )
    spread = Lengths(500, 4000, ((0.5, 300.0), (0.9, 1100.0), (0.99, 2500.0)))
    long = AnalyticalCosts(AnalyticalConfig()).stage_cost(
        problem(model, 8, 256, spread), GENERATE, at, pool(8), "hybrid"
    )
    assert equal.tail <= 0.1 * equal.seconds
    assert long.tail > long.compute + long.memory


def test_more_devices_never_need_more_memory_each() -> None:
    costs, model = AnalyticalCosts(AnalyticalConfig()), mpt(32, 4096)
    asked = problem(model, 64, 1024, Lengths(1024, 1024))
    for plugin, meshes in (
        ("fsdp", [Mesh(data=n) for n in (1, 2, 4, 8, 16)]),
        ("megatron", [Mesh(tensor=n) for n in (1, 2, 4, 8)]),
    ):
        role = replace(asked.role("actor"), plugin=plugin)
        sizes = [costs.memory(asked, role, Placement("actor", "p", mesh, 4), pool(64), "hybrid") for mesh in meshes]
        totals = [size.parameters + size.gradients + size.optimizer for size in sizes]
        assert totals == sorted(totals, reverse=True)
