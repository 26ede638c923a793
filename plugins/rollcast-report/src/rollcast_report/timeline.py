"""The timeline of a run from ``timeline.jsonl``, which shows the work of the trainer and each pool over time."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollcast_report.records import Unreadable, read_records

__all__ = ["TIMELINE_FILE", "PoolUse", "TimelineData", "read_timeline", "render_timeline", "windows"]

TIMELINE_FILE = "timeline.jsonl"
#: Steps that are drawn beside each other, and the most such drawings on a page.
_STEPS, _MOST_WINDOWS = 10, 20
_WIDTH, _LEFT, _RIGHT = 1100.0, 150.0, 14.0
_LANE, _BAR, _TOP = 34.0, 22.0, 8.0
#: Pixels that the number of a step takes.
_LABEL = 34
#: Stages with a colour of their own; the others share the last one.
_COLOURS = 8


@dataclass
class PoolUse:
    """The work of a pool in the whole run.

    Attributes:
        busy_s: seconds in which its processes were at work.
        seconds: seconds of the steps in which the pool existed.
        calls: stage → seconds; stages may run beside each other.
    """

    busy_s: float = 0.0
    seconds: float = 0.0
    calls: dict[str, float] = field(default_factory=dict)

    @property
    def busy(self) -> float:
        """Share of the time in which the pool was at work."""
        return min(1.0, self.busy_s / self.seconds) if self.seconds > 0 else 0.0

    @property
    def idle(self) -> float:
        """Share of the time in which the pool was not at work."""
        return 1.0 - self.busy


@dataclass
class TimelineData:
    """The timeline of a run.

    Attributes:
        steps: number of steps with a line.
        pools: pool → its work in the whole run.
        stages: stage of the trainer → seconds.
        windows: lines of steps that follow each other, a selection that fits a page.
        unreadable: line numbers of malformed lines.
    """

    steps: int = 0
    pools: dict[str, PoolUse] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)
    windows: list[list[dict[str, Any]]] = field(default_factory=list)
    unreadable: list[int] = field(default_factory=list)


def windows(count: int) -> list[range]:
    """Return the ranges of lines to draw: all of a short run, or evenly spread ranges including both ends."""
    whole = max(1, math.ceil(count / _STEPS))
    shown = min(whole, _MOST_WINDOWS)
    places = [round(place * (whole - 1) / max(1, shown - 1)) for place in range(shown)]
    return [range(place * _STEPS, min(count, (place + 1) * _STEPS)) for place in places if count]


def read_timeline(path: Path) -> TimelineData:
    """Read the timeline of a run; empty if there is none. Malformed lines are skipped and reported."""
    data = TimelineData()
    number = 0
    for number, (_, record) in enumerate(read_records(path), start=1):
        if isinstance(record, Unreadable):
            if not record.torn:
                data.unreadable.append(record.line)
        elif _is_line(record):
            data.steps += 1
            _count(record, data)
        else:
            data.unreadable.append(number)
    # Read the file a second time, because a long run has more lines than are drawn.
    drawn = windows(data.steps)
    data.windows = [[] for _ in drawn]
    by_line = {line: place for place, lines in enumerate(drawn) for line in lines}
    line = 0
    for _, record in read_records(path):
        if not isinstance(record, Unreadable) and _is_line(record):
            if line in by_line:
                data.windows[by_line[line]].append(record)
            line += 1
    return data


def _count(line: Mapping[str, Any], data: TimelineData) -> None:
    for stage, spans in line["stages"].items():
        data.stages[stage] = data.stages.get(stage, 0.0) + _length(spans)
    for pool, work in line["pools"].items():
        use = data.pools.setdefault(pool, PoolUse())
        use.busy_s += work["busy_s"]
        use.seconds += line["seconds"]
        for stage, spans in work["calls"].items():
            use.calls[stage] = use.calls.get(stage, 0.0) + _length(spans)


def _length(spans: Iterable[Sequence[float]]) -> float:
    return sum(end - start for start, end in spans)


def _is_line(record: Mapping[str, Any]) -> bool:
    stages, pools = record.get("stages"), record.get("pools")
    return (
        _is_number(record.get("seconds"))
        and isinstance(pools, dict)
        and _are_spans(stages)
        and all(
            isinstance(work, dict) and _is_number(work.get("busy_s")) and _are_spans(work.get("calls"))
            for work in pools.values()
        )
    )


def _are_spans(stages: object) -> bool:
    return isinstance(stages, dict) and all(
        isinstance(spans, list)
        and all(isinstance(span, list) and len(span) == 2 and all(map(_is_number, span)) for span in spans)
        for spans in stages.values()
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


# -- drawing ----------------------------------------------------------------------------------


def render_timeline(data: TimelineData) -> str:
    """Return the section of the report; empty without a timeline."""
    if not data.windows:
        return ""
    colours = _colours(data)
    drawings = []
    for place, lines in enumerate(data.windows):
        hidden = "" if place == len(data.windows) - 1 else " hidden"
        drawings.append(f'<div class="lanes" data-window="{place}"{hidden}>{_drawing(lines, data, colours)}</div>')
    return (
        f'<h2>Timeline</h2><section class="card timeline" aria-label="Timeline">{_choice(data)}{"".join(drawings)}'
        f"{_legend(colours)}{_table(data)}</section>"
    )


def _colours(data: TimelineData) -> dict[str, int]:
    """Return the colour number of each stage; the longest stages have their own colours."""
    total = dict(data.stages)
    for use in data.pools.values():
        for stage, seconds in use.calls.items():
            total[stage] = max(total.get(stage, 0.0), seconds)
    ranked = sorted(total, key=lambda stage: (-total[stage], stage))
    return {stage: min(place, _COLOURS - 1) for place, stage in enumerate(ranked)}


def _choice(data: TimelineData) -> str:
    """Return the controls that choose the steps, unless all are drawn at once, and zoom."""
    zoom = (
        '<button type="button" data-zoom="2">Zoom in</button><button type="button" data-zoom="0.5">Zoom out</button>'
        '<button type="button" data-zoom="0">Whole width</button><span id="timeline-shown" role="status"></span>'
    )
    if len(data.windows) < 2:
        return f'<div class="controls choice">{zoom}</div>'
    options = []
    for place, lines in enumerate(data.windows):
        chosen = " selected" if place == len(data.windows) - 1 else ""
        options.append(f'<option value="{place}"{chosen}>{_named(lines)}</option>')
    drawn = sum(map(len, data.windows))
    note = "" if drawn == data.steps else f"<span>{drawn:,} of {data.steps:,} steps are drawn, evenly spread.</span>"
    return (
        f'<div class="controls choice"><button type="button" data-move="-1">Earlier</button>'
        f'<label>Steps <select id="timeline-steps">{"".join(options)}</select></label>'
        f'<button type="button" data-move="1">Later</button>{zoom}{note}</div>'
    )


def _named(lines: Sequence[Mapping[str, Any]]) -> str:
    first, last = lines[0]["step"], lines[-1]["step"]
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _drawing(lines: Sequence[Mapping[str, Any]], data: TimelineData, colours: Mapping[str, int]) -> str:
    """Return the lanes of some steps, drawn end to end; time between two parts of a run is left out."""
    total = sum(line["seconds"] for line in lines)
    scale = (_WIDTH - _LEFT - _RIGHT) / max(total, 1e-9)
    starts, at = [], _LEFT
    for line in lines:
        starts.append(at)
        at += line["seconds"] * scale
    lanes = [("trainer", [line["stages"] for line in lines])]
    plot = _WIDTH - _LEFT - _RIGHT
    lanes += [(pool, [line["pools"].get(pool, {}).get("calls", {}) for line in lines]) for pool in data.pools]
    bottom = _TOP + _LANE * len(lanes)
    names, bars = [], []
    for number, (name, by_line) in enumerate(lanes):
        top = _TOP + _LANE * number + (_LANE - _BAR) / 2
        text = name if len(name) <= 20 else f"{name[:19]}…"
        names.append(f'<text class="y" x="{_LEFT - 8}" y="{top + 15:.1f}">{html.escape(text)}</text>')
        bars.append(_bars(name, by_line, starts, scale, top, colours))
    label = html.escape(_describe(lines, total))
    return (
        f'<svg viewBox="0 0 {_WIDTH:.0f} {bottom + 28:.0f}" role="img" tabindex="0" aria-label="{label}" '
        f'data-seconds="{total:.6g}">{"".join(names)}{_labels(lines, starts, bottom)}'
        # A drawing of its own, so that zooming changes its view box only.
        f'<svg class="plot" x="{_LEFT}" y="0" width="{plot:.0f}" height="{bottom:.1f}" '
        f'viewBox="{_LEFT} 0 {plot:.0f} {bottom:.1f}" preserveAspectRatio="none">'
        f"{_grid(starts, bottom)}{''.join(bars)}</svg></svg>"
    )


def _grid(starts: Sequence[float], bottom: float) -> str:
    lines = (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom:.1f}" vector-effect="non-scaling-stroke"/>'
        for x in starts
    )
    return f'<g class="grid" aria-hidden="true">{"".join(lines)}</g>'


def _labels(lines: Sequence[Mapping[str, Any]], starts: Sequence[float], bottom: float) -> str:
    """Return the numbers of the steps; those that would lie on each other are hidden until there is room."""
    parts = ['<g class="steps" aria-hidden="true">']
    shown = -math.inf
    for line, x in zip(lines, starts, strict=True):
        hidden = "" if x - shown >= _LABEL else ' visibility="hidden"'
        shown = shown if hidden else x
        parts.append(f'<text class="start" x="{x + 3:.1f}" y="{bottom + 17:.1f}"{hidden}>{line["step"]:,}</text>')
    parts.append(f'<text class="y" x="{_LEFT - 8}" y="{bottom + 17:.1f}">step</text></g>')
    return "".join(parts)


def _bars(
    name: str,
    by_line: Sequence[Mapping[str, Sequence[Sequence[float]]]],
    starts: Sequence[float],
    scale: float,
    y: float,
    colours: Mapping[str, int],
) -> str:
    """Return the bars of a lane, one path per stage."""
    parts = []
    present = {stage for stages in by_line for stage in stages}
    # Draw long work first, so that short work is on top where stages overlap.
    for stage in sorted(present, key=lambda key: (colours[key], key)):
        bars = []
        for stages, left in zip(by_line, starts, strict=True):
            for start, end in stages.get(stage, ()):
                width = max((end - start) * scale, 0.6)
                bars.append(f"M{left + start * scale:.2f} {y:.1f}h{width:.2f}v{_BAR:.0f}h-{width:.2f}z")
        if bars:
            title = html.escape(f"{name}: {stage}")
            parts.append(f'<path class="s{colours[stage]}" d="{"".join(bars)}"><title>{title}</title></path>')
    return "".join(parts)


def _describe(lines: Sequence[Mapping[str, Any]], total: float) -> str:
    use: dict[str, PoolUse] = {}
    for line in lines:
        for pool, work in line["pools"].items():
            pool_use = use.setdefault(pool, PoolUse())
            pool_use.busy_s, pool_use.seconds = pool_use.busy_s + work["busy_s"], pool_use.seconds + line["seconds"]
    shares = ", ".join(f"{pool} {share.busy * 100:.0f} %" for pool, share in use.items())
    steps = "step" if len(lines) == 1 else "steps"
    return f"Timeline of {steps} {_named(lines)}, {total:.3g} s. Busy: {shares or 'no pool was recorded'}."


def _legend(colours: Mapping[str, int]) -> str:
    names: dict[int, list[str]] = {}
    for stage, colour in colours.items():
        names.setdefault(colour, []).append(stage)
    items = []
    for colour, stages in names.items():
        listed = html.escape(", ".join(stage.replace("_", " ") for stage in stages))
        items.append(f'<li><i class="s{colour}"></i><b>{listed}</b></li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def _table(data: TimelineData) -> str:
    """Return the shares of the whole run in numbers."""
    if not data.pools:
        return ""
    rows = []
    for pool, use in data.pools.items():
        ranked = sorted(use.calls.items(), key=lambda item: -item[1])
        calls = ", ".join(
            f"{stage.replace('_', ' ')} {seconds / max(use.seconds, 1e-9) * 100:.1f} %" for stage, seconds in ranked
        )
        rows.append(
            f'<tr><th scope="row">{html.escape(pool)}</th><td>{use.busy * 100:.1f} %</td>'
            f"<td>{use.idle * 100:.1f} %</td><td>{html.escape(calls) or 'nothing'}</td></tr>"
        )
    return (
        '<table><thead><tr><th scope="col">Pool</th><th scope="col">Busy</th><th scope="col">Idle</th>'
        f'<th scope="col">Share of the time by stage</th></tr></thead><tbody>{"".join(rows)}</tbody></table>'
        '<p class="hint">A pool is busy while any of its processes works on a call or has a response under way. Stages '
        "may run beside each other. The lane of the trainer shows the stage that it was in, waiting included. Keys on "
        "a drawing: + and - zoom, 0 shows the whole, the arrows move, Page Up and Page Down change the steps.</p>"
    )
