"""Curves as inline SVG, readable without a script and annotated for the script that adds tooltips."""

from __future__ import annotations

import html
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollcast_report.intervals import Band
from rollcast_report.run_data import Series

__all__ = ["ChartSpec", "Line", "format_number", "mark_shape", "render_chart", "render_lines", "smooth", "thin"]

_MAX_POINTS = 1200
_MARKERS_UP_TO = 24
_SMOOTH_FROM = 20


@dataclass(frozen=True)
class ChartSpec:
    """Metric, title and axis of a curve.

    Attributes:
        metric: name of the metric.
        title: title of the chart.
        unit: unit of the y axis; ``%`` shows a fraction as a percentage.
        floor, ceiling: limits of the y axis, unless a value lies beyond them.
        mark_zero: True if the value at step 0 was measured before training and is marked.
    """

    metric: str
    title: str
    unit: str = ""
    floor: float | None = None
    ceiling: float | None = None
    mark_zero: bool = False


def format_number(value: float, unit: str = "") -> str:
    """Format a number for display: three or four digits, thousands as k, a fraction as a percentage."""
    if unit == "%":
        return f"{value * 100:.1f} %"
    size = abs(value)
    if size >= 1e9:
        return f"{value / 1e9:.3g}G"
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    if size >= 100:
        return f"{value:.0f}"
    if size >= 1e-3 or size == 0:
        return f"{value:.4g}" if size < 1 else f"{value:.3g}"
    return f"{value:.2e}".replace("e-0", "e-")


def _nice_step(span: float, count: int) -> float:
    raw = span / count
    base = 10.0 ** math.floor(math.log10(raw))
    for factor in (1.0, 2.0, 2.5, 5.0):
        if factor * base >= raw * 0.999:
            return factor * base
    return 10.0 * base


def _ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """Return round values from at or below ``low`` to at or above ``high``."""
    step = _nice_step(high - low, count)
    if whole:
        step = max(1.0, step if step != 2.5 else 2.0)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def _tick_labels(ticks: list[float], unit: str) -> list[str]:
    """Return labels with the same number of decimals and the same scale."""
    scale, suffix = (100.0, " %") if unit == "%" else (1.0, "")
    top = max(abs(tick) for tick in ticks) * scale
    if unit != "%" and top >= 1e9:
        scale, suffix = 1e-9, "G"
    elif unit != "%" and top >= 1e6:
        scale, suffix = 1e-6, "M"
    elif unit != "%" and top >= 1e4:
        scale, suffix = 1e-3, "k"
    step = abs(ticks[1] - ticks[0]) * scale
    if top and (top < 1e-3 or top >= 1e12):
        return ["0" if tick == 0 else f"{tick * scale:.3g}{suffix}".replace("e-0", "e-") for tick in ticks]
    decimals = next((d for d in range(10) if abs(round(step, d) - step) < step * 1e-6), 9)
    return [f"{tick * scale:.{decimals}f}{suffix}" for tick in ticks]


def _y_range(values: list[float], spec: ChartSpec) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = (high - low) * 0.06
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-12):  # constant: room around it
        margin = abs(high) * 0.1 or 0.5
    floor = low - margin if spec.floor is None else max(spec.floor, low - margin)
    ceiling = high + margin if spec.ceiling is None else min(spec.ceiling, high + margin)
    if low >= 0:  # no negative axis for values that are never negative
        floor = max(floor, 0.0)
    floor, ceiling = min(floor, low), max(ceiling, high)
    if ceiling - floor <= 0:  # a constant that sits on its bound
        floor, ceiling = (floor - 2 * margin, ceiling) if spec.ceiling == ceiling else (floor, ceiling + 2 * margin)
    return floor, ceiling


def smooth(values: list[float], span: float) -> list[float]:
    """Return means over neighbours, weighted exponentially on both sides, so that the curve does not lag."""
    keep = 1.0 - 2.0 / (span + 1.0)
    result = [0.0] * len(values)
    weights = [0.0] * len(values)
    for order in (range(len(values)), range(len(values) - 1, -1, -1)):
        total = weight = 0.0
        for index in order:
            total, weight = total * keep + values[index], weight * keep + 1.0
            result[index] += total
            weights[index] += weight
    return [total / weight for total, weight in zip(result, weights, strict=True)]


def _is_noisy(values: list[float]) -> bool:
    travel = sum(abs(b - a) for a, b in itertools.pairwise(values))
    return len(values) >= _SMOOTH_FROM and travel > 2.5 * (max(values) - min(values)) > 0


def thin(series: Series, limit: int = _MAX_POINTS) -> Series:
    """Reduce a series to about ``limit`` points, the lowest and highest of each bucket, so that spikes stay visible."""
    if len(series) <= limit:
        return series
    size = math.ceil(2 * len(series) / limit)
    points: Series = []
    for start in range(0, len(series), size):
        bucket = [(step, value) for step, value in series[start : start + size] if value is not None]
        if not bucket:
            points.append(series[start])
            continue
        low = min(bucket, key=lambda point: point[1])
        high = max(bucket, key=lambda point: point[1])
        points += sorted({low, high})
    if points[-1] != series[-1]:
        points.append(series[-1])
    return points


class _Frame:
    """The plot area of one chart and its scales."""

    def __init__(
        self, series: Series, spec: ChartSpec, width: int, height: int, x_max: int, bands: Sequence[Band] = ()
    ) -> None:
        values = [value for _, value in series if value is not None]
        values += [bound for band in bands for _, low, high in band.points for bound in (low, high)]
        y_low, y_high = _y_range(values, spec)
        self.y_ticks = _ticks(y_low, y_high, 5 if height > 220 else 3)
        self.y_labels = _tick_labels(self.y_ticks, spec.unit)
        x_low = min(step for step, _ in series)
        x_low = 0 if x_low <= max(1, x_max * 0.2) else x_low
        x_high = max(x_max, x_low + 1)
        self.x_ticks = [t for t in _ticks(x_low, x_high, 6 if width > 400 else 4, whole=True) if x_low <= t <= x_high]
        self.left = 14 + 6.6 * max(4, *(len(label) for label in self.y_labels))
        self.right, self.top, self.bottom = width - 14.0, 12.0, height - 28.0
        self._x, self._y = (x_low, x_high), (self.y_ticks[0], self.y_ticks[-1])

    def x(self, step: float) -> float:
        """Return the pixel of a step."""
        low, high = self._x
        return round(self.left + (step - low) / (high - low) * (self.right - self.left), 1)

    def y(self, value: float) -> float:
        """Return the pixel of a value."""
        low, high = self._y
        return round(self.bottom - (value - low) / (high - low) * (self.bottom - self.top), 1)

    def axes(self) -> str:
        """Return the grid, the ticks and their labels as SVG."""
        parts = ['<g class="grid" aria-hidden="true">']
        for tick, label in zip(self.y_ticks, self.y_labels, strict=True):
            y = self.y(tick)
            parts.append(f'<line x1="{self.left:.1f}" x2="{self.right:.1f}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text class="y" x="{self.left - 8:.1f}" y="{y + 3.8:.1f}">{label}</text>')
        for tick in self.x_ticks:
            parts.append(f'<text class="x" x="{self.x(tick)}" y="{self.bottom + 21:.1f}">{tick:,.0f}</text>')
        parts.append(f'<text class="y" x="{self.left - 8:.1f}" y="{self.bottom + 21:.1f}">step</text>')
        return "".join([*parts, "</g>"])


def _segments(series: Series) -> list[list[tuple[int, float]]]:
    """Return the runs of values without a gap."""
    runs: list[list[tuple[int, float]]] = [[]]
    for step, value in series:
        if value is None:
            runs.append([])
        else:
            runs[-1].append((step, value))
    return [run for run in runs if run]


def _path(series: Series, frame: _Frame, css: str) -> str:
    commands = [
        "M" + "L".join(f"{frame.x(step)} {frame.y(value)}" for step, value in run)
        for run in _segments(series)
        if len(run) > 1
    ]
    return f'<path class="{css}" d="{"".join(commands)}"/>' if commands else ""


def _band_path(band: Band, frame: _Frame, css: str, span: float) -> str:
    """Return the area between the bounds, smoothed over ``span`` steps if that is above 1."""
    points = band.points[:: math.ceil(len(band.points) / _MAX_POINTS)]
    lows, highs = [low for _, low, _ in points], [high for _, _, high in points]
    if span > 1:
        lows, highs = smooth(lows, span), smooth(highs, span)
    steps = [step for step, _, _ in points]
    if len(points) == 1:  # one validation: a bar
        x, top, bottom = frame.x(steps[0]), frame.y(highs[0]), frame.y(lows[0])
        return f'<path class="{css}" d="M{x - 3} {top}h6V{bottom}h-6z"/>'
    there = [f"{frame.x(step)} {frame.y(value)}" for step, value in zip(steps, highs, strict=True)]
    back = [f"{frame.x(step)} {frame.y(value)}" for step, value in zip(steps, lows, strict=True)]
    return f'<path class="{css}" d="M{"L".join(there + back[::-1])}z"/>'


def _is_before(step: int, spec: ChartSpec) -> bool:
    return spec.mark_zero and step == 0


def _dots(series: Series, frame: _Frame, spec: ChartSpec) -> str:
    """Return markers: all points of a short series; of a long one only lone points between gaps."""
    runs = _segments(series)
    finite = [point for run in runs for point in run]
    if len(finite) <= _MARKERS_UP_TO:
        shown = finite
    else:
        shown = [run[0] for run in runs if len(run) == 1]
    parts = []
    for step, value in shown:
        before = _is_before(step, spec)
        css = "dot before" if before else "dot"
        parts.append(f'<circle class="{css}" cx="{frame.x(step)}" cy="{frame.y(value)}" r="{4 if before else 3}"/>')
    return "".join(parts)


def _describe(series: Series, spec: ChartSpec) -> str:
    finite = [(step, value) for step, value in series if value is not None]
    if not finite:
        return f"{spec.title}: no value."

    def show(value: float) -> str:
        return format_number(value, spec.unit)

    (first_step, first), (last_step, last) = finite[0], finite[-1]
    values = [value for _, value in finite]
    if len(finite) == 1:
        return f"{spec.title}: {show(first)} at step {first_step}."
    return (
        f"{spec.title}: {show(first)} at step {first_step}, {show(last)} at step {last_step}; "
        f"lowest {show(min(values))}, highest {show(max(values))}."
    )


def render_chart(series: Series, spec: ChartSpec, width: int, height: int, x_max: int, band: Band | None = None) -> str:
    """Return one curve with its heading as an HTML figure.

    Args:
        series: steps and values; may be empty or have gaps.
        spec: metric, title and axis.
        width, height: size of the drawing in pixels.
        x_max: last step of the x axis.
        band: 95 % interval of the values; None if unknown.
    """
    title, name = html.escape(spec.title), html.escape(spec.metric)
    finite = [value for _, value in series if value is not None]
    unit = f' <span class="unit">{html.escape(spec.unit)}</span>' if spec.unit not in ("", "%") else ""
    mark = ""
    if any(_is_before(step, spec) and value is not None for step, value in series):
        mark = '<span class="mark"><i></i>before training</span>'
    if band is not None:
        mark += f'<span class="mark band-mark" title="{html.escape(band.method)}"><i></i>95 % interval</span>'
    latest = f'<span class="latest">{format_number(finite[-1], spec.unit)}</span>' if finite else ""
    caption = f'<figcaption><span class="name" title="{name}">{title}{unit}</span>{mark}{latest}</figcaption>'
    if not finite:
        return f'<figure class="chart">{caption}<p class="empty">No value was recorded.</p></figure>'
    frame = _Frame(series, spec, width, height, x_max, [] if band is None else [band])
    points = thin(series)
    lines, span = _path(points, frame, "line"), 1.0
    if _is_noisy(finite):
        span = min(100.0, max(5.0, len(finite) / 15))
        lines = _path(points, frame, "line faint") + _path(thin(_smoothed(series, span)), frame, "line")
    bounds = {} if band is None else {step: (low, high) for step, low, high in band.points}
    if band is not None:
        lines = _band_path(band, frame, "band", span) + lines
    data = [
        [frame.x(step), frame.y(value), step, _with_bounds(value, bounds.get(step), spec.unit)]
        for step, value in points
        if value is not None
    ]
    return (
        f'<figure class="chart">{caption}<svg viewBox="0 0 {width} {height}" role="img" tabindex="0" '
        f'aria-label="{html.escape(_describe(series, spec))}" data-points="{html.escape(json.dumps(data))}" '
        f'data-top="{frame.top}" data-bottom="{frame.bottom}">'
        f"<title>{html.escape(_describe(series, spec))}</title>{frame.axes()}"
        f"{lines}{_dots(points, frame, spec)}</svg></figure>"
    )


def _smoothed(series: Series, span: float) -> Series:
    known = [(step, value) for step, value in series if value is not None]
    return list(zip((step for step, _ in known), smooth([value for _, value in known], span), strict=True))


def _with_bounds(value: float, bounds: tuple[float, float] | None, unit: str) -> str:
    text = format_number(value, unit)
    if bounds is None:
        return text
    return f"{text} ({format_number(bounds[0], unit)} to {format_number(bounds[1], unit)})"


@dataclass(frozen=True)
class Line:
    """One of several curves of a chart.

    Attributes:
        name: its name in descriptions.
        style: number of its colour and dash pattern.
        series: steps and values.
        band: 95 % interval of the values; None if unknown.
    """

    name: str
    style: int
    series: Series
    band: Band | None = None


def render_lines(lines: Sequence[Line], spec: ChartSpec, width: int, height: int, x_max: int) -> str:
    """Return several curves over the same axes as an HTML figure; lines without a value are left out."""
    shown = [curve for curve in lines if any(value is not None for _, value in curve.series)]
    title = html.escape(spec.title)
    unit = f' <span class="unit">{html.escape(spec.unit)}</span>' if spec.unit not in ("", "%") else ""
    name = html.escape(spec.metric)
    bands = [curve.band for curve in shown if curve.band is not None]
    mark = ""
    if bands:
        methods = html.escape("; ".join(sorted({band.method for band in bands})))
        mark = f'<span class="mark band-mark" title="{methods}"><i></i>95 % interval</span>'
    caption = f'<figcaption><span class="name" title="{name}">{title}{unit}</span>{mark}</figcaption>'
    frame = _Frame([point for curve in shown for point in curve.series], spec, width, height, x_max, bands)
    parts = []
    for line in shown:
        known = [value for _, value in line.series if value is not None]
        span = min(100.0, max(5.0, len(known) / 15)) if _is_noisy(known) else 1.0
        drawn = _smoothed(line.series, span) if span > 1 else line.series
        if line.band is not None:
            parts.append(_band_path(line.band, frame, f"band c{line.style}", span))
        parts.append(_path(thin(drawn), frame, f"line c{line.style}"))
        parts.append(_end_mark(drawn, frame, line.style))
    described = " ".join(_describe(curve.series, ChartSpec(spec.metric, curve.name, spec.unit)) for curve in shown)
    label = html.escape(f"{spec.title}. {described}")
    data = html.escape(json.dumps(_shared_points(shown, frame, spec.unit)))
    return (
        f'<figure class="chart">{caption}<svg viewBox="0 0 {width} {height}" role="img" tabindex="0" '
        f'aria-label="{label}" data-points="{data}" data-top="{frame.top}" data-bottom="{frame.bottom}">'
        f"<title>{label}</title>{frame.axes()}{''.join(parts)}</svg></figure>"
    )


def _end_mark(series: Series, frame: _Frame, style: int) -> str:
    """Return a mark at the last value, of another shape for each line."""
    step, value = next(point for point in reversed(series) if point[1] is not None)
    return mark_shape(frame.x(step), frame.y(value or 0.0), style)


def mark_shape(x: float, y: float, style: int) -> str:
    """Return the mark of a line as SVG: circle, square, diamond or triangle."""
    shapes = (
        f"M{x - 4} {y}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
        f"M{x - 4} {y - 4}h8v8h-8z",
        f"M{x} {y - 5.5}l5.5 5.5l-5.5 5.5l-5.5 -5.5z",
        f"M{x} {y - 5}l5 9h-10z",
    )
    return f'<path class="end c{style}" d="{shapes[style % len(shapes)]}"/>'


def _shared_points(lines: Sequence[Line], frame: _Frame, unit: str) -> list[list[float | str]]:
    """Return the points for the tooltip: each step with the values of all lines."""
    by_step: dict[int, list[tuple[str, float]]] = {}
    for line in lines:
        for step, value in thin(line.series, 400):
            if value is not None:
                by_step.setdefault(step, []).append((line.name, value))
    return [
        [frame.x(step), frame.y(values[0][1]), step, " · ".join(f"{n} {format_number(v, unit)}" for n, v in values)]
        for step, values in sorted(by_step.items())
    ]
