"""The cost model ``analytical`` against the kernel times of the package aiconfigurator-core, by phase.

Decoding takes 1 to 256 rows with 512 to 8,192 tokens of context, a prefill pass 1 to 16 prompts of 512 to 8,192 tokens, at most
16,384 in all; four models in bfloat16, on 1 to 8 devices of a node. An error is predicted by measured seconds, less one::

    python tests/benchmarks/bench_kernel_times.py --systems h200_sxm,h100_sxm --backend vllm

Options of the cost model come as in ``rollcast map``: ``cost_model.memory=0.9``.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from rollcast import build_section
from rollcast_automap.contract import (
    Lengths,
    Mesh,
    ModelFacts,
    Placement,
    Pool,
    Problem,
    RoleSpec,
    StageSpec,
)
from rollcast_automap.costs.aiconfigurator import AiconfiguratorConfig, AiconfiguratorCosts, KernelSeconds
from rollcast_automap.costs.analytical import AnalyticalConfig, AnalyticalCosts
from rollcast_automap.costs.clusters import ClusterConfig, build_cluster

#: Layers, hidden, heads, heads of keys, feed-forward width, vocabulary, parameters, of the models' config.json.
MODELS = {
    "Qwen2.5-7B": ModelFacts(28, 3584, 28, 4, 18944, 152064, 7_615_616_512, 128),
    "Llama-3-8B": ModelFacts(32, 4096, 32, 8, 14336, 128256, 8_030_261_248, 128),
    "Qwen2.5-32B": ModelFacts(64, 5120, 40, 8, 27648, 152064, 32_763_876_352, 128),
    "Llama-3-70B": ModelFacts(80, 8192, 64, 8, 28672, 128256, 70_553_706_496, 128),
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (512, 1024, 2048, 4096, 8192)
TENSOR = (1, 2, 4, 8)
PREFILL_ROWS, PREFILL_TOKENS = (1, 2, 4, 8, 16), 16384


@dataclass(frozen=True)
class Point:
    """One pass: what it is, and its predicted and measured seconds."""

    system: str
    phase: str
    model: str
    tensor: int
    rows: int
    length: int
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted by measured seconds, less one."""
        return self.predicted / self.measured - 1


def list_points(systems: Sequence[str], backend: str, costs: AnalyticalCosts) -> Iterator[Point]:
    """Yield every pass that the database has times for."""
    measured = AiconfiguratorCosts(AiconfiguratorConfig())
    for system, (name, model), tensor in itertools.product(systems, MODELS.items(), TENSOR):
        times = measured.times(system, backend, model, tensor) if model.heads % tensor == 0 else ""
        if isinstance(times, str):
            continue
        for rows, length in itertools.product(ROWS, CONTEXTS):
            predicted = _predict(costs, system, model, tensor, ("decode", rows, length))
            yield Point(system, "decode", name, tensor, rows, length, predicted, _sum(times.decode(rows, length)))
        for rows, length in itertools.product(PREFILL_ROWS, CONTEXTS):
            if rows * length <= PREFILL_TOKENS:
                predicted = _predict(costs, system, model, tensor, ("prefill", rows, length))
                yield Point(system, "prefill", name, tensor, rows, length, predicted, _sum(times.prefill(rows, length)))


def _sum(found: KernelSeconds) -> float:
    return found.busy + found.wire


def _predict(costs: AnalyticalCosts, system: str, model: ModelFacts, tensor: int, asked: tuple[str, int, int]) -> float:
    """Return the seconds of one pass by the formulas."""
    phase, rows, length = asked
    role = RoleSpec("rollout", "generates", model, "vllm")
    problem = Problem(
        roles=(role,),
        stages=(StageSpec("rollout", "rollout", "generate"),),
        prompts=rows,
        samples=1,
        mini_batches=1,
        epochs=1,
        prompt_lengths=Lengths(length, length),
        response_lengths=Lengths(1, 1),
        cluster=build_cluster(ClusterConfig(device=system.partition("_")[0])),
    )
    at, place = (
        Placement("rollout", "pool", Mesh(tensor=tensor), rows),
        costs._place(problem, Pool("pool", ((0, tensor),))),
    )
    if phase == "prefill":
        return sum(costs._prefill(problem, role, at, place))
    return sum(costs._decode(model, at.mesh, place, rows, length))


def _row(table: Table, label: Sequence[str], points: Sequence[Point]) -> None:
    sizes = sorted(points, key=lambda each: abs(each.error))
    worst = sizes[-1]
    table.add_row(
        *label,
        str(len(points)),
        f"{statistics.median(each.error for each in points):+.0%}",
        f"{statistics.median(abs(each.error) for each in points):.0%}",
        f"{abs(sizes[int(0.9 * (len(sizes) - 1))].error):.0%}",
        f"{worst.error:+.0%}",
        f"{worst.model}, {worst.tensor} devices, {worst.rows} x {worst.length}",
    )


def main() -> None:
    """Print the errors by phase, and by phase and a size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default="h200_sxm,h100_sxm")
    parser.add_argument("--backend", default="vllm")
    parser.add_argument("--by", default="tensor", choices=("tensor", "rows", "length", "model"))
    parser.add_argument("overrides", nargs="*")
    chosen = parser.parse_args()
    pairs = (text.removeprefix("cost_model.").split("=", 1) for text in chosen.overrides)
    given = {key: float(value) for key, value in pairs}
    costs = AnalyticalCosts(build_section(AnalyticalConfig, given, "cost_model", closed=True))
    points = list(list_points(chosen.systems.split(","), chosen.backend, costs))
    table = Table(title=f"analytical against {chosen.backend}'s kernels")
    for title in ("system", "phase", chosen.by, "passes", "median", "median size", "90 %", "worst", "of"):
        table.add_column(title)
    for system, phase in itertools.product(chosen.systems.split(","), ("decode", "prefill")):
        found = [each for each in points if (each.system, each.phase) == (system, phase)]
        _row(table, (system, phase, "all"), found)
        for value in dict.fromkeys(getattr(each, chosen.by) for each in found):
            _row(table, ("", "", str(value)), [each for each in found if getattr(each, chosen.by) == value])
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
