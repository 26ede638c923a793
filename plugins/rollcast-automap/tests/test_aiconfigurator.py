"""The cost model ``aiconfigurator``, and ``analytical`` against its kernel times; skipped without aiconfigurator-core."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from rollcast import build_section
from rollcast.errors import ConfigError
from rollcast_automap.contract import Lengths, Mesh, ModelFacts, Placement, Pool, Problem, StageCost, StageSpec
from rollcast_automap.costs.aiconfigurator import AiconfiguratorConfig, AiconfiguratorCosts, KernelSeconds, KernelTimes
from rollcast_automap.costs.analytical import AnalyticalConfig, AnalyticalCosts
from rollcast_automap.costs.clusters import ClusterConfig, build_cluster
from rollcast_automap.search.planners import BranchAndBound
from rollcast_automap.testing import CostModelSuite, small_problem

needs_database = pytest.mark.skipif(
    importlib.util.find_spec("aiconfigurator_core") is None, reason="aiconfigurator-core is not installed"
)
LLAMA = ModelFacts(32, 4096, 32, 8, 14336, 128256, 8_030_261_248, 128)
ONE = Mesh()
QWEN = ModelFacts(28, 3584, 28, 4, 18944, 152064, 7_615_616_512, 128)


def problem(device: str = "h200", plugin: str = "vllm", model: ModelFacts = LLAMA, **changes: Any) -> Problem:
    base = small_problem(8)
    roles = tuple(replace(role, model=model) for role in base.roles)
    roles = tuple(replace(role, plugin=plugin) if role.kind == "generates" else role for role in roles)
    return replace(base, roles=roles, cluster=build_cluster(ClusterConfig(device=device, nodes=2)), **changes)


def costs(**options: Any) -> AiconfiguratorCosts:
    return AiconfiguratorCosts(build_section(AiconfiguratorConfig, options, "cost_model", closed=True))


def generation(asked: Problem, model: AnalyticalCosts, mesh: Mesh = ONE, rows: int = 16) -> StageCost:
    at, pool = Placement("rollout", "pool", mesh, rows), Pool("pool", ((0, mesh.size),))
    return model.stage_cost(asked, asked.stages[0], at, pool, "standalone")


@needs_database
class TestAiconfiguratorCosts(CostModelSuite):
    name = "aiconfigurator"

    def problem(self) -> Problem:
        return replace(
            small_problem(), cluster=build_cluster(ClusterConfig(device="h200", devices_per_node=4, nodes=2))
        )


@needs_database
class TestAnotherEngine(TestAiconfiguratorCosts):
    settings: ClassVar[Mapping[str, Any]] = {"backend": "sglang", "systems": {"h200": "h100_sxm"}}


@needs_database
def test_a_generation_is_made_of_passes_of_the_database() -> None:
    """Rows of equal length, all at once: one prefill, and a token for all of them at each context."""
    asked = problem(prompt_lengths=Lengths(256, 256), response_lengths=Lengths(64, 64), prompts=4)
    model = costs()
    cost = generation(asked, model)
    times = model.times("h200_sxm", "vllm", LLAMA, 1)
    assert isinstance(times, KernelTimes)
    steps = [times.decode(16, 256 + done) for done in range(64)]
    expected = times.prefill(16, 256).busy + sum(step.busy + step.wire for step in steps)
    assert cost.seconds == pytest.approx(expected, rel=0.02)
    assert cost.note == ""
    assert cost.communication == 0.0
    shared = generation(asked, model, Mesh(tensor=4))
    assert 0 < shared.communication < shared.seconds < cost.seconds


@needs_database
def test_other_stages_have_analytical_prices() -> None:
    asked, analytical = problem(), AnalyticalCosts(AnalyticalConfig())
    at, pool = Placement("actor", "pool", Mesh(data=8), 4), Pool("pool", ((0, 8),))
    for model in (analytical, costs(compute=0.8)):
        found = model.stage_cost(asked, asked.stages[-1], at, pool, "hybrid")
        assert found == analytical.stage_cost(asked, asked.stages[-1], at, pool, "hybrid")


@needs_database
def test_what_the_database_lacks_is_analytical_and_says_so() -> None:
    analytical = AnalyticalCosts(AnalyticalConfig())
    for model, message in (
        (replace(LLAMA, heads=48, head_size=80), "no kernels of vllm on h200_sxm for 48 heads of 80"),
        (replace(LLAMA, ffn=4096), "a mixture of experts"),
    ):
        found = generation(problem(model=model), costs())
        assert message in found.note
        assert replace(found, note="") == generation(problem(model=model), analytical)
    other = generation(problem(plugin="hf"), costs())
    assert other.note == "priced as vllm: the database has no hf"
    assert replace(other, note="") == generation(problem(), costs())


@needs_database
def test_the_slowest_kind_of_a_pool_counts() -> None:
    mixed = build_cluster(
        build_section(ClusterConfig, {"groups": [{"device": "h200"}, {"device": "a100"}]}, "cluster", closed=True)
    )
    asked = replace(problem(), cluster=mixed)
    at = Placement("rollout", "pool", Mesh(data=2), 16)
    seconds = [
        costs().stage_cost(asked, asked.stages[0], at, Pool("pool", places), "standalone").seconds
        for places in (((0, 2),), ((1, 2),), ((0, 1), (1, 1)))
    ]
    assert seconds[0] < seconds[1] == seconds[2]


@needs_database
@pytest.mark.parametrize(
    ("options", "device", "message"),
    [
        ({"backend": "hf"}, "h200", r"cost_model\.backend is 'hf'; valid: auto, sglang, trtllm, vllm"),
        ({"backend_version": "0.1"}, "h200", r"cost_model\.backend_version is '0\.1'; vllm on h200_sxm .*0\.24\.0"),
        ({}, "mi300x", r"no system for 'mi300x'; vllm was measured on a100_sxm, .*cost_model\.systems\.mi300x=SYSTEM"),
        ({"systems": {"h800": "h900"}}, "h800", r"cost_model\.systems\.h800 is 'h900'; .*h100_sxm"),
    ],
)
def test_what_is_not_there_is_named(options: dict[str, Any], device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generation(problem(device), costs(**options))


@needs_database
def test_devices_are_close_to_those_of_the_database() -> None:
    """Two tables from the same datasheets; the database rounds, and gives the B200 the bandwidth of another board."""
    from aiconfigurator_core.sdk.perf_database import load_system_spec

    for name in ("a100", "b200", "h100", "h200", "l4", "l40s"):
        (node,) = build_cluster(ClusterConfig(device=name)).nodes
        spec = load_system_spec(name if name.startswith("l") else f"{name}_sxm")
        assert node.kind.flops["bfloat16"] == pytest.approx(spec["gpu"]["bfloat16_tc_flops"], rel=0.01)
        assert node.kind.memory_bandwidth == pytest.approx(spec["gpu"]["mem_bw"], rel=0.05)
        assert node.link_bandwidth == spec["node"]["intra_node_bw"]


@needs_database
def test_a_search_takes_the_prices() -> None:
    found = BranchAndBound().plan(problem(), costs())
    assert found[0].stages["rollout"].note == ""


@needs_database
@pytest.mark.parametrize(("phase", "median", "worst"), [("decode", 0.12, 0.25), ("prefill", 0.06, 0.20)])
def test_analytical_is_close_to_the_kernels(phase: str, median: float, worst: float) -> None:
    """Passes of the table in docs/cost-models.md; no constant was fitted on them."""
    formula, database, errors = AnalyticalCosts(AnalyticalConfig()), costs(), []
    for model in (LLAMA, QWEN):
        asked = problem(model=model)
        place = formula._place(asked, Pool("pool", ((0, 8),)))
        for tensor in (1, 2, 4):
            times = database.times("h200_sxm", "vllm", model, tensor)
            assert isinstance(times, KernelTimes)
            mesh = Mesh(tensor=tensor)
            for rows, length in ((1, 512), (1, 8192), (8, 1024), (64, 2048), (256, 512), (256, 8192)):
                if phase == "decode":
                    predicted = sum(formula._decode(model, mesh, place, rows, length))
                    measured = times.decode(rows, length)
                else:
                    rows = min(rows, 16384 // length)
                    pass_of = replace(asked, prompts=rows, samples=1, prompt_lengths=Lengths(length, length))
                    at = Placement("rollout", "pool", mesh, rows)
                    predicted = sum(formula._prefill(pass_of, asked.role("rollout"), at, place))
                    measured = times.prefill(rows, length)
                errors.append(abs(predicted / (measured.busy + measured.wire) - 1))
    assert statistics.median(errors) <= median, errors
    assert max(errors) <= worst, errors


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk", None)
    with pytest.raises(ConfigError, match=r'needs the package aiconfigurator-core: pip install "rollcast-automap\[aic'):
        costs()


def test_times_between_rows_are_interpolated_and_asked_once() -> None:
    asked: list[tuple[int, int]] = []

    class Engine:
        def decode_step_per_op(self, rows: int, context: int, _: int) -> list[tuple[str, float]]:
            asked.append((rows, context))
            return [("generation_qkv_gemm", 10.0 * rows), ("generation_ar_1", 2.0), ("generation_embedding_ar", 1.0)]

    times = KernelTimes(Engine())
    assert times.decode(2, 99.6) == KernelSeconds(0.02, 0.003)
    assert times.decode(2.5, 100).busy == pytest.approx(0.025)
    assert asked == [(2, 100), (3, 100)]


def test_a_stage_without_generation_needs_no_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", type(sys)("aiconfigurator_core"))
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk", type(sys)("aiconfigurator_core.sdk"))
    asked = problem("mi300x")
    stage = StageSpec("update_actor", "actor", "update")
    at, pool = Placement("actor", "pool", Mesh(data=8), 4), Pool("pool", ((0, 8),))
    assert costs().stage_cost(asked, stage, at, pool, "hybrid").seconds > 0
