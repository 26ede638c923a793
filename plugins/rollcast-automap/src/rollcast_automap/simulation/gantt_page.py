"""The Gantt chart of simulated mappings: one HTML file that loads nothing from the network."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib import resources

from rollcast_automap.composition import busy_shares
from rollcast_automap.contract import Prediction, Problem
from rollcast_automap.simulation.mapping_simulation import SYNC, Interval, ReplicaUse, SimulatedMapping
from rollcast_report.page import fill_page

__all__ = ["render_gantt"]

_WIDTH, _LEFT, _RIGHT = 1100.0, 190.0, 16.0
_LANE, _BAR, _TOP, _BOTTOM = 36.0, 24.0, 30.0, 34.0
#: Colours of stages; weight sync, switches and the controller share the last one.
_STAGE_COLOURS, _OTHER = 7, 7
#: Most replicas with a lane of their own, and points in the outline of each.
_MOST_REPLICAS, _POINTS = 16, 400
#: Pixels of a character in a bar, and the width up to which a bar has no label.
_CHARACTER, _NARROW = 6.4, 26.0


def render_gantt(problem: Problem, played: Sequence[tuple[Prediction, SimulatedMapping]], title: str) -> str:
    """Return a page with one chart for each simulated mapping.

    Args:
        problem: the problem that was mapped.
        played: (prediction by the closed form, simulation) of each mapping, best first.
        title: title of the page, as text.
    """
    sections = [_header(problem, played, title)]
    for number, (prediction, run) in enumerate(played, 1):
        sections.append(_section(problem, prediction, run, number))
    assets = resources.files("rollcast_automap.simulation").joinpath("assets")
    style, script = (assets.joinpath(f"gantt.{kind}").read_text("utf-8") for kind in ("css", "js"))
    footer = "Written by rollcast map: stages and rates by the cost model, lengths drawn from their distribution."
    return fill_page(title, sections, footer, style=style, script=script)


def _header(problem: Problem, played: Sequence[tuple[Prediction, SimulatedMapping]], title: str) -> str:
    prediction, run = played[0]
    off = prediction.step_seconds / run.step_seconds - 1
    facts = (
        ("Simulated step", _seconds(run.step_seconds)),
        ("Predicted step", _seconds(prediction.step_seconds)),
        ("Rows of a step", f"{problem.rows:,}"),
        ("Devices", f"{sum(pool.devices for pool in prediction.mapping.pools):,} of {problem.cluster.devices:,}"),
    )
    listed = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    lead = (
        f"A step of the best mapping takes <b>{_seconds(run.step_seconds)}</b> on the simulated clock: the mean of "
        f"{len(run.step_times)} steps of {_seconds(min(run.step_times))} to {_seconds(max(run.step_times))}. The "
        f"closed form predicts <b>{_seconds(prediction.step_seconds)}</b> ({off:+.1%})."
    )
    return (
        f'<header><div class="title"><h1>{html.escape(title)}</h1></div><p class="lead">{lead}</p>'
        f'<dl class="facts">{listed}</dl></header>'
    )


def _section(problem: Problem, prediction: Prediction, run: SimulatedMapping, number: int) -> str:
    mapping = prediction.mapping
    ahead = f", {mapping.max_staleness} ahead" if mapping.max_staleness else ""
    colours = _colours(problem)
    note = "Arrow keys move between bars and lanes. Bars of generation cover the time in which any replica decodes."
    if run.warm_up:
        note += f" The first {run.warm_up} steps fill the pipeline; no figure counts them."
    return (
        f'<h2>Mapping {number}: {html.escape(mapping.mode)}{ahead}</h2><section class="card timeline gantt" '
        f'aria-label="Gantt chart of mapping {number}">{_drawing(problem, prediction, run, colours)}</section>'
        f'<div class="timeline">{_legend(run, colours)}</div><p class="hint">{note}</p>'
        f"{_pool_table(problem, prediction, run)}{_stage_table(prediction, run)}"
    )


def _colours(problem: Problem) -> dict[str, int]:
    return {stage.name: min(place, _STAGE_COLOURS - 1) for place, stage in enumerate(problem.stages)}


def _drawing(problem: Problem, prediction: Prediction, run: SimulatedMapping, colours: dict[str, int]) -> str:
    end = run.ends[-1]
    scale = (_WIDTH - _LEFT - _RIGHT) / end
    generator = next(stage for stage in problem.stages if stage.kind == "generate")
    home = next(placement.pool for placement in prediction.mapping.placements if placement.role == generator.role)
    lanes: list[str] = []
    for pool in prediction.mapping.pools:
        roles = ", ".join(placement.role for placement in prediction.mapping.placements if placement.pool == pool.name)
        devices = f"{pool.devices} device" + ("s" if pool.devices > 1 else "")
        lanes.append(_lane(f"{pool.name}, {devices}", roles, _of(run, pool.name), _top(len(lanes)), scale, colours))
        if pool.name == home:
            for number, replica in enumerate(run.replicas[:_MOST_REPLICAS]):
                lanes.append(_replica(replica, number, _top(len(lanes)), scale, colours[generator.name], run))
    if controller := _of(run, ""):
        lanes.append(_lane("controller", "", controller, _top(len(lanes)), scale, colours))
    bottom = _top(len(lanes))
    label = f"Gantt chart of {len(run.ends)} steps in {_seconds(end)}: " + ", ".join(
        f"{pool} busy {share:.0%}" for pool, share in run.busy().items()
    )
    hidden = len(run.replicas) - _MOST_REPLICAS
    more = f'<p class="hint">{hidden} further replicas are not drawn.</p>' if hidden > 0 else ""
    return (
        f'<svg viewBox="0 0 {_WIDTH:.0f} {bottom + _BOTTOM:.0f}" role="group" aria-label="{html.escape(label)}">'
        f"{_grid(run, scale, bottom)}{''.join(lanes)}</svg>{more}"
    )


def _top(lane: int) -> float:
    return _TOP + _LANE * lane


def _of(run: SimulatedMapping, pool: str) -> list[Interval]:
    return [interval for interval in run.intervals if interval.pool == pool]


def _grid(run: SimulatedMapping, scale: float, bottom: float) -> str:
    """Return the SVG of the axes: step marks at the top and seconds at the bottom."""
    parts = ['<g class="grid" aria-hidden="true">']
    if run.warm_up:
        parts.append(f'<path class="warm" d="M{_LEFT} {_TOP}h{run.begins * scale:.1f}v{bottom - _TOP:.1f}H{_LEFT}z"/>')
    shown = _LEFT - 100
    for number, (start, end) in enumerate(zip((0.0, *run.ends), run.ends, strict=False), 1):
        x = _LEFT + start * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 18}" y2="{bottom:.1f}"/>')
        text = f"warm-up {number}" if number <= run.warm_up else f"step {number}"
        if x - shown > _CHARACTER * 10 and (end - start) * scale > 12:
            parts.append(f'<text x="{x + 4:.1f}" y="{_TOP - 8}">{text}</text>')
            shown = x
    x = _LEFT + run.ends[-1] * scale
    parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 18}" y2="{bottom:.1f}"/>')
    for place in range(6):
        x, anchor = _LEFT + (_WIDTH - _LEFT - _RIGHT) * place / 5, "end" if place == 5 else "middle"
        text = _seconds(run.ends[-1] * place / 5)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 20:.1f}" text-anchor="{anchor}">{text}</text>')
    return "".join([*parts, "</g>"])


def _lane(
    name: str, roles: str, intervals: Sequence[Interval], top: float, scale: float, colours: dict[str, int]
) -> str:
    """Return the SVG lane of a pool: its name, its roles, and a bar for each interval."""
    y = top + (_LANE - _BAR) / 2
    parts = [f'<g data-lane role="group" aria-label="{html.escape(f"Pool {name}: {roles}" if roles else name)}">']
    parts.append(f'<text class="y pool" x="{_LEFT - 10}" y="{y + 10:.1f}">{html.escape(_cut(name))}</text>')
    parts.append(f'<text class="y" x="{_LEFT - 10}" y="{y + 23:.1f}">{html.escape(_cut(roles))}</text>')
    for place, interval in enumerate(intervals):
        x, width = _LEFT + interval.start * scale, max((interval.end - interval.start) * scale, 1.0)
        shown = _shown(interval.name)
        step = f"step {interval.step}" if interval.step else "rows of several steps"
        said = f"{shown}, {step}: {_seconds(interval.end - interval.start)}, from {interval.start:.4g} "
        said += f"to {interval.end:.4g} s"
        fits = width > _NARROW and int((width - 8) / _CHARACTER)
        text = shown if fits and len(shown) <= fits else f"{shown[: fits - 1]}…" if fits and fits > 3 else ""
        label = f'<text x="{x + 5:.1f}" y="{y + 16:.1f}">{html.escape(text)}</text>' if text else ""
        parts.append(
            f'<g class="bar" role="img" tabindex="{-1 if place else 0}" aria-label="{html.escape(said)}" '
            f'data-tip="{html.escape(said)}" data-start="{interval.start:.4f}"><title>{html.escape(said)}</title>'
            f'<path class="s{colours.get(interval.name, _OTHER)}" d="M{x:.1f} {y:.1f}h{width:.1f}v{_BAR:.0f}'
            f'h-{width:.1f}z"/>'
            f"{label}</g>"
        )
    return "".join([*parts, "</g>"])


def _replica(replica: ReplicaUse, number: int, top: float, scale: float, colour: int, run: SimulatedMapping) -> str:
    """Return the SVG lane of a replica: active sequences over time; full height means that all slots are busy."""
    y, high = top + 4, _LANE - 8
    points = [f"M{_LEFT} {y + high:.1f}"]
    width = replica.seconds / _POINTS
    for place, active in enumerate(_means(replica)):
        x = _LEFT + place * width * scale
        level = y + high * (1 - min(active / replica.slots, 1.0))
        points.append(f"L{x:.1f} {level:.1f}H{x + width * scale:.1f}")
    points.append(f"V{y + high:.1f}z")
    said = (
        f"Replica {number + 1}: busy {replica.busy(run.begins):.0%} of the time, "
        f"{replica.occupancy(run.begins):.0%} of its {replica.slots} slots taken on average"
    )
    box = f'<rect x="{_LEFT}" y="{y:.1f}" width="{_WIDTH - _LEFT - _RIGHT:.1f}" height="{high:.1f}"/>'
    return (
        f'<g data-lane><text class="y" x="{_LEFT - 10}" y="{y + high / 2 + 4:.1f}">replica {number + 1}, '
        f'{replica.slots} slots</text><g class="lane" role="img" tabindex="0" aria-label="{said}" data-tip="{said}" '
        f'data-start="0"><title>{said}</title>{box}<path class="s{colour}" d="{"".join(points)}"/></g></g>'
    )


def _means(replica: ReplicaUse) -> list[float]:
    """Return the mean number of active sequences in each of ``_POINTS`` equal parts of the run."""
    width = replica.seconds / _POINTS
    values = [0.0] * _POINTS
    for (begin, active), (end, _) in zip(replica.changes, replica.changes[1:], strict=False):
        place = int(begin / width)
        while active and place < _POINTS and place * width < end:
            values[place] += active * max(min(end, (place + 1) * width) - max(begin, place * width), 0.0) / width
            place += 1
    return values


def _legend(run: SimulatedMapping, colours: dict[str, int]) -> str:
    names: dict[int, list[str]] = {}
    for name in dict.fromkeys([*colours, *(interval.name for interval in run.intervals)]):
        names.setdefault(colours.get(name, _OTHER), []).append(_shown(name))
    items = (
        f'<li><i class="s{colour}"></i><b>{html.escape(", ".join(labels))}</b></li>' for colour, labels in names.items()
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _pool_table(problem: Problem, prediction: Prediction, run: SimulatedMapping) -> str:
    expected = busy_shares(problem, prediction)
    rows = "".join(
        f'<tr><th scope="row">{html.escape(pool)}</th><td>{share:.1%}</td><td>{1 - share:.1%}</td>'
        f"<td>{expected[pool]:.1%}</td></tr>"
        for pool, share in run.busy().items()
    )
    ages = [age for step in run.ages[run.warm_up :] for age in step]
    old = f"; trained groups are {sum(ages) / len(ages):.2f} versions old, {max(ages)} at most" if any(ages) else ""
    return (
        '<div class="scroll figures"><table><thead><tr><th scope="col">Pool</th><th scope="col">Busy</th>'
        '<th scope="col">Idle</th><th scope="col">Busy, predicted</th></tr></thead>'
        f'<tbody>{rows}</tbody></table></div><p class="hint">A step takes {_seconds(run.step_seconds)}, '
        f"{_seconds(prediction.step_seconds)} by the closed form{old}.</p>"
    )


def _stage_table(prediction: Prediction, run: SimulatedMapping) -> str:
    """Return an HTML table of the mean seconds per step of each stage, simulated and predicted."""
    counted = len(run.step_times)
    rows = []
    for name, cost in prediction.stages.items():
        homes = {interval.pool for interval in run.intervals if interval.name == name}
        spans = [interval for interval in run.intervals if interval.name == name and interval.pool == min(homes)]
        seconds = sum(max(span.end - max(span.start, run.begins), 0.0) for span in spans) / counted
        rows.append(
            f'<tr><th scope="row">{html.escape(_shown(name))}</th><td>{_seconds(seconds)}</td>'
            f"<td>{_seconds(cost.seconds)}</td></tr>"
        )
    return (
        '<details><summary>Stages</summary><div class="inner"><table><thead><tr><th scope="col">Stage</th>'
        '<th scope="col">Simulated, a step</th><th scope="col">Predicted</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def _shown(name: str) -> str:
    return name.replace("_", " ") if name == SYNC else name


def _cut(name: str) -> str:
    return name if len(name) <= 27 else f"{name[:26]}…"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
