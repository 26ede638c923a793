"""The cost model ``measured``: seconds and bytes from tables of ``rollcast profile``, corrected by finished runs."""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from rollcast.contracts.config import LocalPath, config
from rollcast.errors import ConfigError
from rollcast_automap.composition import find_generator, find_trained, predict
from rollcast_automap.contract import (
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
from rollcast_automap.costs.analytical import AnalyticalConfig, AnalyticalCosts
from rollcast_automap.costs.clusters import DEVICE_KINDS
from rollcast_automap.costs.decoding import read_decoding
from rollcast_automap.costs.length_curve import LengthCurve
from rollcast_automap.measured.measured_run import MeasuredRun, read_run, worker_bytes
from rollcast_automap.memory.role_memory import longest_of, longest_pass
from rollcast_automap.profiling.costs import PHASES, CostTable, Phase, RoleLayout, read_costs

__all__ = ["Grid", "MeasuredConfig", "MeasuredCosts"]

#: Kind, plugin, parameters of the model (0 for any) and mode ("" for any).
_PriceKey = tuple[str, str, int, str]

#: Largest ratio of asked to measured size that needs no note.
_NEAR = 1.25
#: Kind of a stage → phases that have to be measured for its price.
_PHASES: dict[str, tuple[Phase, ...]] = {
    "generate": ("prefill", "decode"),
    "forward": ("forward",),
    "update": ("forward_backward",),
}


@config
class MeasuredConfig(AnalyticalConfig):
    """Keys of the measurements. The other keys are those of ``analytical``, which prices what was not measured."""

    tables: list[LocalPath] = field(default_factory=list)
    """Files that ``rollcast profile`` wrote; at least one."""
    runs: list[LocalPath] = field(default_factory=list)
    """Directories of runs whose times correct the prices."""


@dataclass(frozen=True)
class Grid:
    """Measured values by rows and length, interpolated linearly and extrapolated with the outermost slope.

    Attributes:
        rows: row counts in rising order.
        lengths: lengths in rising order.
        values: a value for each length and row count. Values never fall as rows or lengths rise: noise is removed.
    """

    rows: tuple[float, ...]
    lengths: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]

    @classmethod
    def build(cls, points: Iterable[tuple[float, float, float]]) -> Grid:
        """Return the grid of (rows, length, value) points; missing row counts of a length are extrapolated.

        Raises:
            ConfigError: ``points`` is empty.
        """
        value_at = {(rows, length): value for rows, length, value in points}
        if not value_at:
            raise ConfigError("a grid of measurements needs at least one measurement")
        rows = tuple(sorted({point[0] for point in value_at}))
        lengths = tuple(sorted({point[1] for point in value_at}))
        lines: list[tuple[float, ...]] = []
        before = (0.0,) * len(rows)
        for length in lengths:
            known = [(count, value_at[count, length]) for count in rows if (count, length) in value_at]
            xs, ys = zip(*known, strict=True)
            most, line = 0.0, []
            for count, below in zip(rows, before, strict=True):
                most = max(most, below, _line(xs, ys, count))
                line.append(most)
            before = tuple(line)
            lines.append(before)
        return cls(rows, lengths, tuple(lines))

    def at(self, rows: float, length: float) -> float:
        """Return the value for a number of rows and a length, at least 0."""
        return max(_line(self.lengths, [_line(self.rows, line, rows) for line in self.values], length), 0.0)

    def note(self, rows: float, length: float) -> str:
        """Return a note if a point is far beyond the largest measured rows or length; else an empty string."""
        beyond = [
            f"{asked:,.0f} {name}: {asked / most:.3g} times the largest measured"
            for asked, most, name in ((rows, self.rows[-1], "rows"), (length, self.lengths[-1], "tokens a row"))
            if asked > most * _NEAR
        ]
        return "; ".join(beyond)


def _line(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Interpolate linearly between rising ``xs``; extrapolate with the slope of the first and the last piece."""
    if len(xs) == 1:
        return ys[0]
    place = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    share = (x - xs[place - 1]) / (xs[place] - xs[place - 1])
    return ys[place - 1] + share * (ys[place] - ys[place - 1])


class _Source:
    """The measurements of a role in a table.

    Args:
        table: the table.
        role: name of the role in the table.
        layout: mesh and engine of the role.
        note: origin of figures that were derived from another mesh; empty for measured figures.
    """

    def __init__(self, table: CostTable, role: str, layout: RoleLayout, note: str = "") -> None:
        self.table, self.role, self.layout, self.note = table, role, layout, note
        self.mesh = Mesh(layout.data_parallel, layout.tensor_parallel, layout.pipeline_parallel)
        #: Mode of a rollout; None for other roles.
        self.mode = layout.settings.get("mode")
        # FSDP computes a shared prompt only once if the model is not sharded, so such passes are a separate kind.
        shares = bool(layout.settings.get("share_prompts")) and layout.world_size == 1
        #: Key of comparable measurements: with equal keys, the times of two meshes differ only because of the mesh.
        self.purpose = (role, self.mode, shares)
        self.model = (layout.engine, layout.parameters)
        #: True if the rows of a pass are padded to the longest row.
        self.pads = layout.settings.get("use_remove_padding") is False
        self._grids: dict[Phase, Grid | None] = {}
        self._peaks: dict[Phase, Grid | None] = {}

    def grid(self, phase: Phase) -> Grid | None:
        """Return the seconds of a phase; None if it was not measured."""
        if phase not in self._grids:
            rows = self.table.find(self.role, phase)
            points = [(row.batch_size, row.length, row.seconds) for row in rows if row.seconds is not None]
            self._grids[phase] = Grid.build(points) if points else None
        return self._grids[phase]

    def seconds(self, phase: Phase, rows: float, length: float) -> float:
        """Return the seconds of a phase; 0 if it was not measured."""
        grid = self.grid(phase)
        return 0.0 if grid is None else grid.at(rows, length)

    def peaks(self, phase: Phase) -> Grid | None:
        """Return the peak bytes of a phase; None if they were not measured."""
        if phase not in self._peaks:
            rows = self.table.find(self.role, phase)
            points = [(row.batch_size, row.length, float(row.peak_bytes)) for row in rows if row.peak_bytes]
            self._peaks[phase] = Grid.build(points) if points else None
        return self._peaks[phase]


def _points(source: _Source, phase: Phase) -> dict[tuple[int, int], float]:
    """Return (rows, length) → seconds of a phase."""
    rows = source.table.find(source.role, phase)
    return {(row.batch_size, row.length): row.seconds for row in rows if row.seconds}


def _fit(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit y = slope * x + offset, both at least 0, with the least squared relative error over (x, y) pairs."""
    xs, ones = [x / y for x, y in pairs], [1 / y for _, y in pairs]
    xx, x1, one1 = (sum(a * b for a, b in zip(*both, strict=True)) for both in ((xs, xs), (xs, ones), (ones, ones)))
    sum_x, sum_1 = sum(xs), sum(ones)
    whole = xx * one1 - x1 * x1
    if len(pairs) > 1 and whole > 1e-12 * xx * one1:
        slope, offset = (sum_x * one1 - sum_1 * x1) / whole, (xx * sum_1 - x1 * sum_x) / whole
        if slope >= 0 and offset >= 0:
            return slope, offset
        if slope < 0:
            return 0.0, sum_1 / one1
    return sum_x / xx, 0.0


def _carry(source: _Source, there: Sequence[tuple[_Source, _Source]]) -> _Source | None:
    """Estimate the measurements of a role on another mesh; None if no phase can be estimated.

    For each phase, a line is fitted through the times of other models that were measured on both meshes. The slope is
    the slowdown because ranks share hardware, and the offset is the cost of collectives.

    Args:
        source: measurements on one mesh.
        there: pairs of measurements of other models, on this mesh and on the other mesh.
    """
    lines: dict[Phase, tuple[float, float]] = {}
    for phase in PHASES:
        both = [(_points(here, phase), _points(other, phase)) for here, other in there]
        pairs = [(here[size], other[size]) for here, other in both for size in here.keys() & other.keys()]
        if pairs:
            lines[phase] = _fit(sorted(pairs))
    rows = [
        replace(measurement, seconds=lines[measurement.phase][0] * measurement.seconds + lines[measurement.phase][1])
        for measurement in source.table.measurements
        if measurement.role == source.role and measurement.seconds is not None and measurement.phase in lines
    ]
    if not rows:
        return None
    one, other = there[0]
    layout = replace(
        source.layout,
        world_size=other.layout.world_size,
        data_parallel=other.mesh.data,
        tensor_parallel=other.mesh.tensor,
        pipeline_parallel=other.mesh.pipeline,
    )
    note = f"from a mesh of {_describe(one.mesh)}, as {Path(other.layout.model_path).name} changes"
    return _Source(replace(source.table, measurements=rows), source.role, layout, note)


def _carried(sources: Sequence[_Source]) -> list[_Source]:
    """Return estimates for meshes on which a model was not measured, derived from other models on two meshes.

    Models of the same engine are preferred. Without one, models of other engines show how ranks slow each other down.
    """
    pairs: dict[tuple[Any, ...], list[tuple[_Source, _Source]]] = defaultdict(list)
    for one, other in itertools.permutations(sources, 2):
        if one.purpose == other.purpose and one.model == other.model and one.mesh != other.mesh:
            for engine in (one.layout.engine, ""):
                pairs[(one.purpose, engine, one.mesh, other.mesh)].append((one, other))
    known = {(known_source.purpose, known_source.model, known_source.mesh) for known_source in sources}
    targets = sorted({key[-1] for key in pairs}, key=lambda mesh: (mesh.data, mesh.tensor, mesh.pipeline))
    carried_sources = []
    for source, target in itertools.product(sources, targets):
        engines = (source.layout.engine, "")
        there = next(
            filter(None, (pairs.get((source.purpose, other_engine, source.mesh, target)) for other_engine in engines)),
            None,
        )
        if there is not None and (source.purpose, source.model, target) not in known:
            carried = _carry(source, there)
            carried_sources += [] if carried is None else [carried]
    return carried_sources


@dataclass(frozen=True)
class Correction:
    """Corrections of the prices, derived from finished runs.

    Attributes:
        scales: key of :func:`_price_keys` → ratio of measured to predicted seconds.
        bytes: engine and parameters of the model (0 for any) → bytes to add to the peak of a pass.
        controller: mode, or ``""`` for any → (rows of a step, seconds of the controller in a step), by rising rows.
    """

    scales: Mapping[_PriceKey, float] = field(default_factory=dict)
    bytes: Mapping[tuple[str, int], float] = field(default_factory=dict)
    controller: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)

    def scale(self, kind: str, role: RoleSpec, mode: Mode) -> float:
        """Return the factor of a price from the most similar runs; 1 without runs."""
        return next((self.scales[key] for key in _price_keys(kind, role, mode) if key in self.scales), 1.0)

    def extra_bytes(self, role: RoleSpec) -> float:
        """Return the bytes to add to the peak of a role's passes, by its model, else by its engine."""
        return self.bytes.get((role.plugin, role.model.parameters), self.bytes.get((role.plugin, 0), 0.0))


def _price_keys(kind: str, role: RoleSpec, mode: Mode) -> list[_PriceKey]:
    """Return the keys of a price, most specific first: plugin, model and mode; plugin and model; plugin.

    The key of a weight sync always includes the mode.

    Args:
        kind: kind of a stage, or ``sync``.
        role: role that computes the stage, or receives the weights.
        mode: mode of the mapping.
    """
    model = role.model.parameters
    if kind == "sync":
        return [(kind, role.plugin, model, mode), (kind, role.plugin, 0, mode)]
    return [(kind, role.plugin, model, mode), (kind, role.plugin, model, ""), (kind, role.plugin, 0, "")]


def correct(costs: BaseCostModel, runs: Sequence[MeasuredRun]) -> Correction:
    """Return the corrections: the median deviation of measured from predicted figures over runs."""
    ratios: dict[_PriceKey, list[float]] = defaultdict(list)
    excess: dict[tuple[str, int], list[float]] = defaultdict(list)
    controller: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        problem, mode, prediction = run.problem, run.mapping.mode, predict(run.problem, costs, run.mapping)
        priced = {stage.name: (str(stage.kind), problem.role(stage.role)) for stage in problem.stages}
        generator, trained = find_generator(problem), find_trained(problem)
        if generator is not None:
            priced["weight_sync"] = ("sync", generator)
        for name, (kind, role) in priced.items():
            # Generation that runs ahead competes with training for the driver (and for cores on a CPU), which the
            # prices do not cover. Its times would distort the correction, so they are left out.
            beside = kind == "generate" and run.mapping.max_staleness > 0
            if run.stages.get(name) and prediction.stages[name].seconds and not beside:
                for key in _price_keys(kind, role, mode):
                    ratios[key].append(run.stages[name] / prediction.stages[name].seconds)
        for candidate in (mode, ""):
            controller[candidate][problem.rows].append(max(run.step_seconds - run.busy_seconds, 0.0))
        if run.peak_bytes is not None and trained is not None:
            for size in (trained.model.parameters, 0):
                excess[trained.plugin, size].append(run.peak_bytes - worker_bytes(run, prediction))
    return Correction(
        scales={key: statistics.median(values) for key, values in ratios.items()},
        bytes={key: statistics.median(values) for key, values in excess.items()},
        controller={
            mode: tuple(sorted((rows, statistics.median(values)) for rows, values in entries.items()))
            for mode, entries in controller.items()
        },
    )


def find_device(name: str) -> str:
    """Return the kind of device for the name that a driver reports; ``cpu`` if no kind is known."""
    return next((kind for kind in DEVICE_KINDS if kind in name.lower().replace("-", " ").split()), "cpu")


def _generation(problem: Problem, source: _Source, at: Placement) -> tuple[float, float, str]:
    """Return the seconds of generation, the part that unequal lengths add, and a note on extrapolation."""
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
    """Return the seconds of passes over a batch, a tail of 0 seconds, and a note on extrapolation."""
    prompt, response = LengthCurve.read(problem.prompt_lengths), LengthCurve.read(problem.response_lengths)
    batches = problem.mini_batches * problem.epochs if trains else 1
    rows = problem.rows * (problem.trained_share / problem.mini_batches if trains else 1) / at.mesh.data
    micro = max(math.ceil(math.ceil(rows) / at.micro_batch_rows), 1)
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
    """Return a price of ``seconds``, which include ``tail``, split into parts in the proportion of ``analytical``."""
    whole = analytical.seconds - analytical.tail
    if not whole:
        return StageCost(compute=seconds - tail, tail=tail, note=note)
    factor = (seconds - tail) / whole
    parts = {name: value * factor for name, value in analytical.parts.items() if name != "tail"}
    return StageCost(**parts, tail=tail, note=note)


def _at_work(parts: MemoryParts) -> int:
    return parts.reserve + parts.held + parts.passing


def _anchor(parts: MemoryParts, peak: int) -> MemoryParts:
    """Return memory parts that add up to a measured ``peak`` in bytes while the role computes.

    If the formulas predict less than the peak, the difference is added to the reserve. If they predict more, the
    difference is taken from activations and logits first, and the remainder from the reserve.
    """
    excess = peak - _at_work(parts)
    if excess >= 0:
        return replace(parts, reserve=parts.reserve + excess)
    bounds = parts.activations + parts.logits
    left = max(bounds + excess, 0)
    logits = round(left * parts.logits / bounds) if bounds else 0
    reserve = max(parts.reserve + min(bounds + excess, 0), 0)
    return replace(parts, reserve=reserve, activations=left - logits, logits=logits)


def _describe(mesh: Mesh) -> str:
    return f"data {mesh.data}, tensor {mesh.tensor}, pipeline {mesh.pipeline}"


def _spread(cluster: Cluster, first: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return the places of ``size`` devices from node ``first`` on; the last node gets all that do not fit before."""
    order = [*range(first, len(cluster.nodes)), *range(first)]
    places, left = {}, size
    for node in order:
        count = min(left, cluster.nodes[node].devices) if node != order[-1] else left
        left -= count
        if count:
            places[node] = count
    return tuple(sorted(places.items()))


class MeasuredCosts(AnalyticalCosts):
    """Prices from measurements of the same model and engine.

    The price of a stage is the sum of its passes, interpolated linearly between the measured rows and lengths, and
    split into parts in the proportion of the analytical price. For a mesh that was not measured, the price is scaled by
    the ratio of the analytical prices of both meshes. If runs are configured, the price is also scaled by the median
    ratio of measured to predicted seconds for its kind and engine. ``StageCost.note`` names what was not measured.

    Raises:
        ConfigError: no table is given.
        DataError: a table or a run cannot be read.
    """

    config_schema: ClassVar[type[CostModelConfig]] = MeasuredConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        measured = [
            _Source(table, role, layout)
            for table in map(read_costs, map(Path, config.tables))
            for role, layout in table.roles.items()
        ]
        self._sources = [*measured, *_carried(measured)]
        if not self._sources:
            raise ConfigError(
                "cost_model.tables is empty; write a table with `rollcast profile`, and pass it as "
                "cost_model.tables=[FILE]"
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
        note = "; ".join(filter(None, (note, source.note)))
        factor = self._factor(problem, stage, placement, pool, mode, source)
        return _share(analytical, seconds * factor, tail * factor, note)

    def generation_speed(
        self, problem: Problem, stage: StageSpec, placement: Placement, pool: Pool, mode: Mode
    ) -> GenerationSpeed | None:
        """Return the speed of a replica of a generating stage, measured if possible, else analytical."""
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
        """Return the factor on measured seconds: the ratio to another mesh times the correction by runs."""
        scale = self._correction.scale(stage.kind, problem.role(stage.role), mode)
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
            cost = super().sync_cost(problem, trained, rollout, mode)
            return replace(cost, note=f"a sync to {role.plugin} in mode {mode} was not measured: analytical")
        factor = self._correction.scale("sync", role, mode)
        return StageCost(communication=source.seconds("sync", 0, 0) * factor)

    def memory(self, problem: Problem, role: RoleSpec, placement: Placement, pool: Pool, mode: Mode) -> MemoryParts:
        """Return the memory of a role on each of its devices: the measured peak plus the analytical difference.

        The analytical difference is that between this placement and the measured one.
        """
        parts = super().memory(problem, role, placement, pool, mode)
        phase: Phase = "forward_backward" if role.kind == "trains" else "forward"
        source = None if role.kind == "generates" else self._find(role, (phase,), placement.mesh, mode)
        peaks = None if source is None else source.peaks(phase)
        if source is None or peaks is None:
            return parts
        prompt, response = map(longest_of, (problem.prompt_lengths, problem.response_lengths))
        rows = placement.micro_batch_rows
        passes = longest_pass(role, placement.mesh, pool.devices, rows, prompt, response, problem.samples)
        peak = round(peaks.at(rows, passes.row_tokens) + self._correction.extra_bytes(role))
        there = self._memory_on(problem, role, placement, pool, mode, source)
        if find_device(source.table.device.name) != "cpu":
            peak += there.reserve  # torch's allocator does not count context and libraries
        return _anchor(parts, peak + _at_work(parts) - _at_work(there))

    def _memory_on(
        self, problem: Problem, role: RoleSpec, placement: Placement, pool: Pool, mode: Mode, source: _Source
    ) -> MemoryParts:
        """Return the analytical memory of a role on the mesh and the devices of a measurement."""
        (first, _), *_rest = pool.places
        there = replace(pool, places=_spread(problem.cluster, first, source.layout.world_size))
        return super().memory(problem, role, replace(placement, mesh=source.mesh), there, mode)

    def controller_cost(self, problem: Problem, mode: Mode) -> StageCost:
        """Return the cost per step of the controller's work between the stages, from the configured runs."""
        known = self._correction.controller
        if not known:
            return StageCost()
        rows, seconds = zip(*known.get(mode, known[""]), strict=True)
        return StageCost(compute=max(_line(rows, seconds, problem.rows), min(seconds)))

    def _find(self, role: RoleSpec, phases: tuple[Phase, ...], mesh: Mesh, mode: Mode) -> _Source | None:
        """Return the closest measurements for a role on a mesh; None if its model and engine were not measured."""

        def nearness(source: _Source) -> tuple[bool, ...]:
            own = source.mesh
            split = (own.tensor, own.pipeline) == (mesh.tensor, mesh.pipeline)
            return role.kind != "generates" or source.mode == mode, split, own == mesh, source.role == role.name

        rows = [
            source
            for source in self._sources
            if (source.layout.engine, source.layout.parameters) == (role.plugin, role.model.parameters)
            and all(source.grid(phase) for phase in phases)
        ]
        return max(rows, key=nearness, default=None)

    def _analytical_on(
        self, problem: Problem, stage: StageSpec, placement: Placement, pool: Pool, mode: Mode, mesh: Mesh
    ) -> StageCost:
        """Return the analytical price of the stage on another mesh with as many rows for each data-parallel part."""
        share = mesh.data / placement.mesh.data
        scaled = replace(problem, prompts=max(round(problem.prompts * share), 1))
        (first, _), *_rest = pool.places
        there = replace(pool, places=_spread(problem.cluster, first, mesh.size))
        return super().stage_cost(scaled, stage, replace(placement, mesh=mesh), there, mode)
