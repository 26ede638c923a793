"""Memory by the cost model ``measured``: anchored on measured peaks, changed by analytical differences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollcast_automap.contract import Lengths, MemoryParts, Mesh, Placement, Pool, Problem, RoleSpec
from rollcast_automap.costs.analytical import AnalyticalConfig, AnalyticalCosts
from rollcast_automap.profiling.costs import CostTable, Measurement, RoleLayout
from rollcast_automap.profiling.devices import DeviceInfo
from rollcast_automap.profiling.measured_costs import MeasuredConfig, MeasuredCosts
from rollcast_automap.testing import small_problem

RANKS = 2
BASE, PER_TOKEN = 5_000_000_000, 2_000_000
AT, POOL = Placement("actor", "p", Mesh(data=RANKS), 4), Pool("p", ((0, RANKS),))


def measured(path: Path, device: str) -> MeasuredCosts:
    """Return a cost model of one table, in which a pass takes ``BASE`` bytes and ``PER_TOKEN`` a token."""
    facts = small_problem().role("actor").model
    layout = RoleLayout("fsdp", "m", facts.parameters, RANKS, RANKS)

    def measure(phase: Any, rows: int, length: int) -> Measurement:
        peak = BASE + PER_TOKEN * rows * length
        return Measurement("actor", phase, rows, length, 1, rows * length, 1.0, 1.0, 1.0, 1, peak_bytes=peak)

    sizes = [(rows, length) for rows in (1, 8) for length in (64, 2048)]
    found = [measure(phase, *size) for phase in ("forward", "forward_backward") for size in sizes]
    table = CostTable("now", {}, DeviceInfo(device, 80 << 30, None), [RANKS], {"actor": layout}, found)
    table.write(path / "costs.json")
    return MeasuredCosts(MeasuredConfig(tables=[str(path / "costs.json")]))


@pytest.fixture
def problem() -> Problem:
    found = small_problem()
    known = Lengths(200.0, 1024, ((0.5, 150.0), (1.0, 700.0)))
    return replace(found, prompt_lengths=Lengths(128.0, 256), response_lengths=known)


@pytest.mark.parametrize("device", ["cpu", "NVIDIA H100"])
def test_the_measured_peak_is_the_peak(tmp_path: Path, problem: Problem, device: str) -> None:
    role = problem.role("actor")
    found = measured(tmp_path, device).memory(problem, role, AT, POOL, "hybrid")
    # The longest response that is known of, not the longest possible.
    peak = BASE + PER_TOKEN * 4 * (256 + 700)
    reserve = AnalyticalCosts(AnalyticalConfig()).memory(problem, role, AT, POOL, "hybrid").reserve
    # On a GPU the peak is that of torch's allocator, and the process has more.
    assert found.reserve + found.held + found.passing == peak + (0 if device == "cpu" else reserve)


def test_another_mesh_differs_by_the_formulas(tmp_path: Path, problem: Problem) -> None:
    costs, role = measured(tmp_path, "cpu"), problem.role("actor")
    four = replace(AT, mesh=Mesh(data=4)), Pool("p", ((0, 4),))
    formulas = [
        AnalyticalCosts(AnalyticalConfig()).memory(problem, role, *there, "hybrid") for there in ((AT, POOL), four)
    ]
    difference = formulas[1].held + formulas[1].passing - formulas[0].held - formulas[0].passing
    assert difference < 0
    found = [costs.memory(problem, role, *there, "hybrid") for there in ((AT, POOL), four)]
    at_work = [parts.reserve + parts.held + parts.passing for parts in found]
    assert at_work[1] - at_work[0] == difference


def test_bounds_give_way_before_counts(tmp_path: Path, problem: Problem) -> None:
    role: RoleSpec = problem.role("actor")
    many = replace(AT, micro_batch_rows=64)
    formula: MemoryParts = AnalyticalCosts(AnalyticalConfig()).memory(problem, role, many, POOL, "hybrid")
    costs = measured(tmp_path, "cpu")
    low = replace(problem, prompt_lengths=Lengths(1.0, 1), response_lengths=Lengths(1.0, 1))
    found = costs.memory(low, role, many, POOL, "hybrid")
    assert (found.parameters, found.gradients, found.optimizer) == (
        *(formula.parameters, formula.gradients),
        formula.optimizer,
    )
    assert found.activations + found.logits < formula.activations + formula.logits
    assert min(vars(found)[name] for name in ("activations", "logits", "reserve")) >= 0
