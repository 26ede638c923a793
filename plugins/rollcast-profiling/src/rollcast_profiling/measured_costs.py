"""The cost model ``measured``: seconds and bytes from tables of ``rollcast profile``, corrected by runs."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from rollcast.contracts.config import config
from rollcast.contracts.mapping import (
    BaseCostModel,
    Cluster,
    CostModelConfig,
    GenerationSpeed,
    MemoryParts,
    Mesh,
    Mode,
    Placement,
    Pool,
    Problem,
    RoleSpec,
    StageCost,
    StageSpec,
)
from rollcast.errors import ConfigError
from rollcast_automap.analytical import AnalyticalConfig, AnalyticalCosts
from rollcast_automap.clusters import DEVICE_KINDS
from rollcast_automap.composition import find_trained, predict
from rollcast_automap.decoding import read_decoding
from rollcast_automap.length_curve import LengthCurve
from rollcast_automap.measured_run import MeasuredRun, read_run
from rollcast_profiling.costs import CostTable, Phase, RoleLayout, read_costs

__all__ = ["Grid", "MeasuredConfig", "MeasuredCosts"]

#: Largest ratio of asked to measured size that needs no note.
_NEAR = 1.25
#: Kind of a stage → what its price needs.
_PHASES: dict[str, tuple[Phase, ...]] = {
    "generate": ("prefill", "decode"),
    "forward": ("forward",),
    "update": ("forward_backward",),
}


@config
class MeasuredConfig(AnalyticalConfig):
    """Measurements. The other keys are those of ``analytical``, which prices what was not measured."""

    tables: list[str] = field(default_factory=list)
    """Files that ``rollcast profile`` wrote; at least one."""
    runs: list[str] = field(default_factory=list)
    """Directories of runs whose times correct the prices."""


@dataclass(frozen=True)
class Grid:
    """Measured values by rows and length, interpolated linearly in both, and extrapolated by the outermost slope.

    Attributes:
        rows: row counts in rising order.
        lengths: lengths in rising order.
        values: one per length and row count; rising in both, as noise is taken out.
    """

    rows: tuple[float, ...]
    lengths: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]

    @classmethod
    def build(cls, points: Iterable[tuple[float, float, float]]) -> Grid:
        """Return the grid of (rows, length, value); lengths with fewer row counts than others are continued.

        Raises:
            ConfigError: there is no point.
        """
        found = {(rows, length): value for rows, length, value in points}
        if not found:
            raise ConfigError("a grid of measurements needs at least one of them")
        rows = tuple(sorted({point[0] for point in found}))
        lengths = tuple(sorted({point[1] for point in found}))
        lines: list[tuple[float, ...]] = []
        before = (0.0,) * len(rows)
        for length in lengths:
            known = [(count, found[count, length]) for count in rows if (count, length) in found]
            xs, ys = zip(*known, strict=True)
            most, line = 0.0, []
            for count, below in zip(rows, before, strict=True):
                most = max(most, below, _line(xs, ys, count))
                line.append(most)
            before = tuple(line)
            lines.append(before)
        return cls(rows, lengths, tuple(lines))

    def at(self, rows: float, length: float) -> float:
        """Return the value of a number of rows and a length, at least 0."""
        return max(_line(self.lengths, [_line(self.rows, line, rows) for line in self.values], length), 0.0)

    def note(self, rows: float, length: float) -> str:
        """Return how far a point is beyond the largest measured one; empty if it is not."""
        beyond = [
            f"{asked:,.0f} {name}: {asked / most:.3g} times the largest measured"
            for asked, most, name in ((rows, self.rows[-1], "rows"), (length, self.lengths[-1], "tokens a row"))
            if asked > most * _NEAR
        ]
        return "; ".join(beyond)


def _line(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Interpolate between rising ``xs``; continue the first and the last piece beyond them."""
    if len(xs) == 1:
        return ys[0]
    place = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    share = (x - xs[place - 1]) / (xs[place] - xs[place - 1])
    return ys[place - 1] + share * (ys[place] - ys[place - 1])


class _Source:
    """The measurements of a role in a table."""

    table: CostTable
    role: str
    layout: RoleLayout

    def __init__(self, table: CostTable, role: str, layout: RoleLayout) -> None:
        self.table, self.role, self.layout = table, role, layout
        self.mesh = Mesh(layout.data_parallel, layout.tensor_parallel, layout.pipeline_parallel)
        #: Mode of a rollout.
        self.mode = layout.settings.get("mode")
        #: Rows of a pass are as long as the longest of them.
        self.pads = layout.settings.get("use_remove_padding") is False
        self._grids: dict[Phase, Grid | None] = {}
        self._peaks: dict[Phase, Grid | None] = {}

    def grid(self, phase: Phase) -> Grid | None:
        """Return the seconds of a phase; None if it was not measured."""
        if phase not in self._grids:
            found = self.table.find(self.role, phase)
            points = [(each.batch_size, each.length, each.seconds) for each in found if each.seconds is not None]
            self._grids[phase] = Grid.build(points) if points else None
        return self._grids[phase]

    def seconds(self, phase: Phase, rows: float, length: float) -> float:
        """Return the seconds of a phase; 0 if it was not measured."""
        grid = self.grid(phase)
        return 0.0 if grid is None else grid.at(rows, length)

    def peaks(self, phase: Phase) -> Grid | None:
        """Return the peak bytes of a phase; None if they were not measured."""
        if phase not in self._peaks:
            found = self.table.find(self.role, phase)
            points = [(each.batch_size, each.length, float(each.peak_bytes)) for each in found if each.peak_bytes]
            self._peaks[phase] = Grid.build(points) if points else None
        return self._peaks[phase]


@dataclass(frozen=True)
class Correction:
    """What runs say about the prices.

    Attributes:
        scales: (kind of a stage and its plugin, or ``sync`` and the mode) → measured by predicted seconds.
        bytes: engine → bytes to add to the peak of a pass.
        controller: (rows of a step, seconds of the controller in it) by rising rows.
    """

    scales: Mapping[tuple[str, str], float] = field(default_factory=dict)
    bytes: Mapping[str, float] = field(default_factory=dict)
    controller: tuple[tuple[float, float], ...] = ()


def correct(costs: BaseCostModel, runs: Sequence[MeasuredRun]) -> Correction:
    """Return the median difference of measured and predicted figures over runs."""
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    excess: dict[str, list[float]] = defaultdict(list)
    controller: dict[float, list[float]] = defaultdict(list)
    for run in runs:
        problem, found = run.problem, predict(run.problem, costs, run.mapping)
        keys = {stage.name: (str(stage.kind), problem.role(stage.role).plugin) for stage in problem.stages}
        keys["weight_sync"] = ("sync", str(run.mapping.mode))
        for name, key in keys.items():
            if run.stages.get(name) and found.stages[name].seconds:
                ratios[key].append(run.stages[name] / found.stages[name].seconds)
        controller[problem.rows].append(max(run.step_seconds - run.busy_seconds, 0.0))
        trained = find_trained(problem)
        if run.peak_bytes is not None and trained is not None:
            excess[trained.plugin].append(run.peak_bytes - found.device_bytes[run.home])
    return Correction(
        scales={key: statistics.median(values) for key, values in ratios.items()},
        bytes={plugin: statistics.median(values) for plugin, values in excess.items()},
        controller=tuple(sorted((rows, statistics.median(values)) for rows, values in controller.items())),
    )


def find_device(name: str) -> str:
    """Return the kind of device that a driver's name means; ``cpu`` if it means none that is known."""
    return next((kind for kind in DEVICE_KINDS if kind in name.lower().split()), "cpu")


def _generation(problem: Problem, source: _Source, at: Placement) -> tuple[float, float, str]:
    """Return the seconds of a generation, those of them that unequal lengths add, and how far it extrapolates."""
    prompt, response = LengthCurve.read(problem.prompt_lengths), LengthCurve.read(problem.response_lengths)
    rows = math.ceil(problem.rows / at.mesh.data)
    decoding = read_decoding(response, rows, at.micro_batch_rows, problem.rows)
    context = prompt.mean + response.mean_square / (2 * response.mean)
    prefill = source.seconds("prefill", decoding.slots, prompt.mean) * rows / decoding.slots
    step = source.seconds("decode", decoding.slots, context)
    seconds = sum(
        steps * source.seconds("decode", active, prompt.mean + done) for steps, active, done in decoding.phases
    )
    grid = source.grid("decode")
    note = "" if grid is None else grid.note(decoding.slots, prompt.mean + decoding.drain[-1][2])
    return prefill + seconds, max(seconds - decoding.equal * step, 0.0), note


def _passes(problem: Problem, source: _Source, at: Placement, trains: bool) -> tuple[float, float, str]:
    """Return the seconds of passes over a batch, 0, and how far they extrapolate."""
    prompt, response = LengthCurve.read(problem.prompt_lengths), LengthCurve.read(problem.response_lengths)
    batches = problem.mini_batches * problem.epochs if trains else 1
    rows = problem.rows * (problem.trained_share / problem.mini_batches if trains else 1) / at.mesh.data
    micro = math.ceil(math.ceil(rows) / at.micro_batch_rows)
    length = prompt.mean + response.mean
    if source.pads:
        count = max(round(rows / micro), 1)
        length = prompt.expected_longest(count) + response.expected_longest(count)
    phase: Phase = "forward_backward" if trains else "forward"
    seconds = micro * source.seconds(phase, rows / micro, length)
    if trains:
        seconds += source.seconds("optimizer", 0, 0)
    grid = source.grid(phase)
    return batches * seconds, 0.0, "" if grid is None else grid.note(rows / micro, length)


def _share(analytical: StageCost, seconds: float, tail: float, note: str) -> StageCost:
    """Return a price of ``seconds``, ``tail`` of them a tail, in the parts of the analytical one."""
    whole = analytical.seconds - analytical.tail
    if not whole:
        return StageCost(compute=seconds - tail, tail=tail, note=note)
    factor = (seconds - tail) / whole
    parts = {name: value * factor for name, value in analytical.parts.items() if name != "tail"}
    return StageCost(**parts, tail=tail, note=note)


def _describe(mesh: Mesh) -> str:
    return f"data {mesh.data}, tensor {mesh.tensor}, pipeline {mesh.pipeline}"


def _spread(cluster: Cluster, first: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return the places of ``size`` devices from node ``first`` on; the last node takes what no other holds."""
    order = [*range(first, len(cluster.nodes)), *range(first)]
    places, left = {}, size
    for node in order:
        taken = min(left, cluster.nodes[node].devices) if node != order[-1] else left
        left -= taken
        if taken:
            places[node] = taken
    return tuple(sorted(places.items()))


class MeasuredCosts(AnalyticalCosts):
    """Prices from measurements of the same model and engine.

    A stage takes the measured passes of its rows and lengths, between the measured sizes by linear interpolation. The
    parts of a price are in the proportion of the analytical ones. Another mesh than the measured ones has the ratio of
    the analytical prices of both. Stages of runs, where there are some, scale the price of their kind and engine by the
    median of measured to predicted seconds. ``StageCost.note`` says what is not measured.

    Raises:
        ConfigError: no table is given.
        DataError: a table or a run cannot be read.
    """

    config_schema: ClassVar[type[CostModelConfig]] = MeasuredConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._sources = [
            _Source(table, role, layout)
            for table in map(read_costs, map(Path, config.tables))
            for role, layout in table.roles.items()
        ]
        if not self._sources:
            raise ConfigError(
                "cost_model.tables is empty; `rollcast profile` writes such tables, and cost_model.tables=[FILE] takes "
                "them"
            )
        self._correction = Correction()
        if config.runs:
            device = find_device(self._sources[0].table.device.name)
            self._correction = correct(self, [read_run(Path(folder), device) for folder in config.runs])

    def stage_cost(self, problem: Problem, stage: StageSpec, placement: Placement, pool: Pool, mode: Mode) -> StageCost:
        """Return the cost of a stage of one step, without its waits for other stages."""
        role = problem.role(stage.role)
        analytical = super().stage_cost(problem, stage, placement, pool, mode)
        source = self._find(role, _PHASES[stage.kind], placement.mesh, mode)
        if source is None:
            return replace(analytical, note=f"{role.plugin} with this model was not measured: analytical")
        if stage.kind == "generate":
            seconds, tail, note = _generation(problem, source, placement)
        else:
            seconds, tail, note = _passes(problem, source, placement, stage.kind == "update")
        if source.mesh != placement.mesh:
            note = "; ".join(filter(None, (note, f"measured on a mesh of {_describe(source.mesh)}")))
        factor = self._factor(problem, stage, placement, pool, mode, source)
        return _share(analytical, seconds * factor, tail * factor, note)

    def generation_speed(
        self, problem: Problem, stage: StageSpec, placement: Placement, pool: Pool, mode: Mode
    ) -> GenerationSpeed | None:
        """Return how fast a replica of a generating stage is, by measurement where there is one."""
        source = self._find(problem.role(stage.role), _PHASES[stage.kind], placement.mesh, mode)
        if source is None:
            return super().generation_speed(problem, stage, placement, pool, mode)
        factor = self._factor(problem, stage, placement, pool, mode, source)
        prompt = LengthCurve.read(problem.prompt_lengths).mean
        slots = min(placement.micro_batch_rows, math.ceil(problem.rows / placement.mesh.data))

        def decode(active: float, context: float) -> float:
            return factor * source.seconds("decode", active, context)

        return GenerationSpeed(factor * source.seconds("prefill", slots, prompt) / slots, decode)

    def _factor(
        self, problem: Problem, stage: StageSpec, placement: Placement, pool: Pool, mode: Mode, source: _Source
    ) -> float:
        """Return by what measured seconds are multiplied: for another mesh, and for what runs said."""
        scale = self._correction.scales.get((stage.kind, problem.role(stage.role).plugin), 1.0)
        if source.mesh == placement.mesh:
            return scale
        other = self._analytical_on(problem, stage, placement, pool, mode, source.mesh).seconds
        return scale * super().stage_cost(problem, stage, placement, pool, mode).seconds / other if other else scale

    def sync_cost(
        self, problem: Problem, trained: tuple[Placement, Pool], rollout: tuple[Placement, Pool], mode: Mode
    ) -> StageCost:
        """Return the cost of one transfer of the trained weights to the rollout, resharding included."""
        role = problem.role(rollout[0].role)
        source = self._find(role, ("sync",), rollout[0].mesh, mode)
        if source is None or source.mode != mode:
            found = super().sync_cost(problem, trained, rollout, mode)
            return replace(found, note=f"a sync to {role.plugin} in mode {mode} was not measured: analytical")
        factor = self._correction.scales.get(("sync", mode), 1.0)
        return StageCost(communication=source.seconds("sync", 0, 0) * factor)

    def memory(self, problem: Problem, role: RoleSpec, placement: Placement, pool: Pool, mode: Mode) -> MemoryParts:
        """Return the memory of a role on each of its devices: the measured peak, changed by analytical differences."""
        parts = super().memory(problem, role, placement, pool, mode)
        phase: Phase = "forward_backward" if role.kind == "trains" else "forward"
        source = None if role.kind == "generates" else self._find(role, (phase,), placement.mesh, mode)
        peaks = None if source is None else source.peaks(phase)
        if source is None or peaks is None:
            return parts
        longest = problem.prompt_lengths.maximum + problem.response_lengths.maximum
        peak = peaks.at(placement.micro_batch_rows, longest) + self._correction.bytes.get(role.plugin, 0)
        there = super().memory(problem, role, replace(placement, mesh=source.mesh), pool, mode)
        total = max(round(peak) + parts.total - there.total, parts.parameters + parts.gradients + parts.optimizer)
        rest = parts.total - parts.reserve
        if total >= rest:
            return replace(parts, reserve=total - rest)
        # The measured passes need less than the formula says: activations and logits share the difference.
        left = parts.activations + parts.logits - (rest - total)
        return replace(parts, reserve=0, logits=0, activations=max(left, 0))

    def controller_cost(self, problem: Problem) -> StageCost:
        """Return the cost per step of what the controller does between the stages, by the runs that were measured."""
        if not self._correction.controller:
            return StageCost()
        rows, seconds = zip(*self._correction.controller, strict=True)
        return StageCost(compute=max(_line(rows, seconds, problem.rows), min(seconds)))

    def _find(self, role: RoleSpec, phases: tuple[Phase, ...], mesh: Mesh, mode: Mode) -> _Source | None:
        """Return the measurements that are closest to a role on a mesh; None if its model and engine have none."""

        def nearness(source: _Source) -> tuple[bool, ...]:
            own = source.mesh
            split = (own.tensor, own.pipeline) == (mesh.tensor, mesh.pipeline)
            return role.kind != "generates" or source.mode == mode, split, own == mesh, source.role == role.name

        found = [
            source
            for source in self._sources
            if (source.layout.engine, source.layout.parameters) == (role.plugin, role.model.parameters)
            and all(source.grid(phase) for phase in phases)
        ]
        return max(found, key=nearness, default=None)

    def _analytical_on(
        self, problem: Problem, stage: StageSpec, placement: Placement, pool: Pool, mode: Mode, mesh: Mesh
    ) -> StageCost:
        """Return the analytical price of the stage on another mesh with as many rows for each data-parallel part."""
        share = mesh.data / placement.mesh.data
        scaled = replace(problem, prompts=max(round(problem.prompts * share), 1))
        (first, _), *_rest = pool.places
        there = replace(pool, places=_spread(problem.cluster, first, mesh.size))
        return super().stage_cost(scaled, stage, replace(placement, mesh=mesh), there, mode)
