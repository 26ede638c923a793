"""The panels of memory and of weight syncs, from the metrics that profiling and the trainer record."""

from __future__ import annotations

import html
import re
import statistics

from rollcast_report.charts import ChartSpec, format_number, render_chart
from rollcast_report.run_data import RunData, Series

__all__ = ["add_sync_bytes", "render_memory", "render_sync"]

_MEMORY = re.compile(r"perf/(?P<kind>max_memory_allocated|max_memory_reserved|cpu_memory_used)_gb(?:/(?P<phase>.+))?")
_KINDS = (
    ("max_memory_allocated", "Device, by tensors"),
    ("max_memory_reserved", "Device, reserved"),
    ("cpu_memory_used", "Resident, a process"),
)
_SYNC = (
    ChartSpec("sync/seconds", "Weight sync", "s", floor=0.0),
    ChartSpec("sync/bytes", "Sent in a sync", "bytes", floor=0.0),
    ChartSpec("sync/GB_per_s", "Rate of the sync", "GB/s", floor=0.0),
    ChartSpec("rollout/weight_version", "Weight version", floor=0.0),
    ChartSpec("staleness/max", "Oldest trained token", "versions", floor=0.0),
)
_AGE = re.compile(r"staleness/(\d+)")


def render_memory(run: RunData) -> str:
    """Return the panel of memory; empty if the run recorded none."""
    table: dict[str, dict[str, list[float]]] = {}
    kinds = set()
    for name in run.series:
        match = _MEMORY.fullmatch(name)
        values = run.values(name)
        if match and values:
            kinds.add(match["kind"])
            table.setdefault(match["phase"] or "", {})[match["kind"]] = values
    if not table:
        return ""
    shown = [kind for kind in _KINDS if kind[0] in kinds]
    most = {kind: max((max(row[kind]) for row in table.values() if kind in row), default=0.0) for kind, _ in shown}
    ranked = sorted(table, key=lambda phase: (phase != "", -max(max(values) for values in table[phase].values())))
    rows = []
    for phase in ranked:
        cells = "".join(_memory_cell(table[phase].get(kind), most[kind]) for kind, _ in shown)
        rows.append(f'<tr><th scope="row">{html.escape(phase.replace("_", " ")) or "whole step"}</th>{cells}</tr>')
    heads = "".join(f'<th scope="col">{label}</th>' for _, label in shown)
    charts = [
        render_chart(run.series[name], ChartSpec(name, label, "GB", floor=0.0), 360, 190, run.steps or 0)
        for kind, label in shown
        if len(run.values(name := f"perf/{kind}_gb")) > 1
    ]
    return (
        f'<h2>Memory</h2><section aria-label="Memory"><div class="small">{"".join(charts)}</div>'
        f'<div class="card scroll"><table><thead><tr><th scope="col">Phase</th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        '<p class="hint">Most of all steps, and of the last one, on the fullest process that worked in the phase; in '
        "10⁹ bytes.</p></section>"
    )


def _memory_cell(values: list[float] | None, most: float) -> str:
    if not values:
        return "<td>-</td>"
    width = max(values) / most * 100 if most > 0 else 0.0
    return (
        f'<td><span class="meter" aria-hidden="true"><i style="width:{width:.1f}%"></i></span>'
        f"{format_number(max(values))} GB, last {format_number(values[-1])} GB</td>"
    )


def add_sync_bytes(run: RunData) -> None:
    """Add ``sync/bytes`` where only the rate and the time of a sync were recorded."""
    if "sync/bytes" in run.series or "sync/GB_per_s" not in run.series:
        return
    seconds = dict(run.series.get("sync/seconds", []))
    sent: Series = [
        (step, None if rate is None or (took := seconds.get(step)) is None else rate * took * 1e9)
        for step, rate in run.series["sync/GB_per_s"]
    ]
    run.series["sync/bytes"] = sent


def render_sync(run: RunData) -> str:
    """Return the panel of weight syncs; empty if no weights were sent."""
    add_sync_bytes(run)
    shown = [spec for spec in _SYNC if run.values(spec.metric)]
    if not any(spec.metric in ("sync/seconds", "staleness/max") for spec in shown):
        return ""
    rows = []
    for spec in shown:
        values = run.values(spec.metric)
        numbers = (statistics.median(values), max(values), values[-1])
        cells = "".join(f"<td>{format_number(value)} {spec.unit}</td>" for value in numbers)
        rows.append(f'<tr><th scope="row">{spec.title}</th>{cells}</tr>')
    charts = [render_chart(run.series[spec.metric], spec, 360, 190, run.steps or 0) for spec in shown]
    heads = "".join(f'<th scope="col">{label}</th>' for label in ("", "Median", "Most", "Last"))
    return (
        f'<h2>Weight sync and staleness</h2><section aria-label="Weight sync and staleness"><div class="small">'
        f'{"".join(charts)}</div><div class="card scroll"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}'
        f"</tbody></table></div>{_ages(run)}</section>"
    )


def _ages(run: RunData) -> str:
    """Return the shares of trained tokens by age over the whole run."""
    ages = sorted((int(match[1]), name) for name in run.series if (match := _AGE.fullmatch(name)))
    steps = max((len(run.series[name]) for _, name in ages), default=0)
    shares = [(age, sum(run.values(name)) / steps) for age, name in ages] if steps else []
    text = ", ".join(_share(age, share) for age, share in shares if share >= 0.0005)
    return f'<p class="hint">Trained tokens by age in weight versions, over all steps: {text}.</p>' if text else ""


def _share(age: int, share: float) -> str:
    return f"age {age}: {share * 100:.1f} %"
