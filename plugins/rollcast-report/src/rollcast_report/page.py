"""Rendering of the report as one HTML page; all text from the run is escaped here."""

from __future__ import annotations

import base64
import hashlib
import html
import statistics
from collections.abc import Mapping, Sequence
from importlib import resources
from string import Template
from typing import Any

from rollcast_report.charts import ChartSpec, format_number, render_chart
from rollcast_report.explorer import render_explorer
from rollcast_report.intervals import find_band, is_bound
from rollcast_report.panels import render_memory, render_sync
from rollcast_report.run_data import RunData
from rollcast_report.timeline import render_timeline

__all__ = ["LARGE", "SMALL", "custom_metrics", "describe_time", "fill_page", "render_page"]

#: Curves that every report shows large, and small, if the run has the metric.
LARGE = (
    ChartSpec("reward/mean", "Reward"),
    ChartSpec("sft/loss", "Training loss"),
    ChartSpec("val/accuracy", "Validation accuracy", "%", 0.0, 1.0, mark_zero=True),
    ChartSpec("val/loss", "Validation loss", mark_zero=True),
)
# Metrics that every reinforcement-learning run should have; the report shows missing ones.
_EXPECTED = ("reward/mean", "val/accuracy")
SMALL = (
    ChartSpec("actor/kl", "KL to the policy before the update"),
    ChartSpec("actor/entropy", "Entropy", "nats"),
    ChartSpec("actor/clip_fraction", "Clipped tokens", "%", 0.0, 1.0),
    ChartSpec("actor/grad_norm", "Gradient norm", floor=0.0),
    ChartSpec("sft/grad_norm", "Gradient norm", floor=0.0),
    ChartSpec("response_length/mean", "Response length", "tokens", floor=0.0),
    ChartSpec("rollout/response_length_mean", "Response length", "tokens", floor=0.0),
    ChartSpec("rollout/tokens_per_s", "Throughput", "tokens/s", floor=0.0),
    ChartSpec("sft/tokens_per_s", "Throughput", "tokens/s", floor=0.0),
    ChartSpec("time/step_s", "Step time", "s", floor=0.0),
    ChartSpec("staleness/mean", "Age of trained tokens", "versions", floor=0.0),
    ChartSpec("rollout/idle_s", "Engines idle", "s", floor=0.0),
    ChartSpec("rollout/logprob_gap_max", "Log-probability gap, largest", "nats", floor=0.0),
)
# Metrics without a curve: groups and names that every run has. Every other metric, such as one that a reward, a loss or
# a stage of the user's recorded, is drawn under its own name.
_COMMON_GROUPS = (
    "agent/",
    "critic/",
    "judge/",
    "perf/",
    "recovery/",
    "response_length/",
    "rollout/",
    "rollout_corr/",
    "sft/",
    "staleness/",
    "sync/",
    "time/",
    "val/",
)
_COMMON = {
    "actor/clip_fraction_lower",
    "actor/entropy_loss",
    "actor/kl_loss",
    "actor/lr",
    "actor/pg_loss",
    "actor/reward_kl_penalty",
    "actor/skipped_steps",
    "actor/zero_advantage_rows",
    "reward/accuracy",
    "reward/baseline_mean",
    "reward/errors",
    "reward/max",
    "reward/min",
    "reward/model_mean",
}
_MAX_CUSTOM = 24
# Subject of the first sentence: the first of these metrics that was recorded.
_LEADING = (
    ("val/accuracy", "Validation accuracy", "%"),
    ("val/loss", "Validation loss", ""),
    ("reward/mean", "Mean reward", ""),
    ("sft/loss", "Loss", ""),
)
_PILLS = {
    "finished": ("good", "Finished"),
    "running": ("plain", "Running"),
    "interrupted": ("warn", "Interrupted"),
    "failed": ("bad", "Failed"),
    "unknown": ("plain", "End not recorded"),
}


def _asset(name: str) -> str:
    return resources.files("rollcast_report").joinpath("assets", name).read_text("utf-8")


def describe_time(seconds: float) -> str:
    """Return a duration with its units, such as ``3 min 4 s``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def _when(step: int) -> str:
    return "before training" if step == 0 else f"at step {step}"


def _lead(run: RunData) -> str:
    """Return one sentence on the result of the run."""
    leading = next((item for item in _LEADING if run.values(item[0])), None)
    if leading is None:
        return "Nothing has been measured yet." if run.steps is None else "No reward or validation was recorded."
    metric, name, unit = leading
    points = [(step, value) for step, value in run.series[metric] if value is not None]
    (first_step, first), (last_step, last) = points[0], points[-1]
    start, end = format_number(first, unit), format_number(last, unit)
    if len(points) == 1:
        return f"{name} was <b>{start}</b> {_when(first_step)}."
    if start == end:
        return f"{name} stayed at <b>{end}</b> from {_when(first_step).removeprefix('at ')} to step {last_step}."
    verb = "rose" if last > first else "fell"
    return f"{name} {verb} from <b>{start}</b> {_when(first_step)} to <b>{end}</b> at step {last_step}."


def _facts(run: RunData) -> list[tuple[str, str]]:
    done, total = run.steps or 0, run.status.total_steps
    step_times = run.values("time/step_s")
    facts = [("Steps", f"{done:,} of {total:,}" if total and total != done else f"{done:,}")]
    wall = max(run.status.elapsed_s, sum(step_times))
    if wall > 0:
        facts.append(("Wall time", describe_time(wall)))
    if step_times:
        facts.append(("Median step", f"{statistics.median(step_times):.3g} s"))
    for metric in ("rollout/tokens_per_s", "sft/tokens_per_s"):
        if rates := run.values(metric):
            facts.append(("Median throughput", f"{format_number(statistics.median(rates))} tokens/s"))
    best = max(
        ((value, -step) for step, value in run.series.get("val/accuracy", []) if value is not None), default=None
    )
    if best is not None and len(run.series["val/accuracy"]) > 1:
        facts.append(("Best accuracy", f"{format_number(best[0], '%')} {_when(-best[1])}"))
    return facts


def _header(run: RunData) -> str:
    css, label = _PILLS.get(run.status.state, _PILLS["unknown"])
    facts = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in _facts(run))
    message = f'<p class="message">{html.escape(run.status.message)}</p>' if run.status.message else ""
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in run.notes)
    return (
        f'<header><div class="title"><h1>{html.escape(run.name)}</h1><span class="pill {css}">{label}</span></div>'
        f'<p class="lead">{_lead(run)}</p>{message}{notes}<dl class="facts">{facts}</dl></header>'
    )


def _charts(run: RunData) -> str:
    if run.steps is None:
        return '<p class="card empty">No metrics yet. Curves appear here after the first step.</p>'
    is_supervised = "sft/loss" in run.series
    x_max = run.steps
    large = [
        render_chart(run.series.get(spec.metric, []), spec, 560, 290, x_max, find_band(spec.metric, run.series))
        for spec in LARGE
        if spec.metric in run.series or (spec.metric in _EXPECTED and not is_supervised)
    ]
    small = [
        render_chart(run.series[spec.metric], spec, 360, 190, x_max) for spec in SMALL if spec.metric in run.series
    ]
    small += [
        render_chart(run.series[name], ChartSpec(name, name), 360, 190, x_max, find_band(name, run.series))
        for name in custom_metrics(run)
    ]
    return (
        f'<section aria-label="Curves"><div class="large">{"".join(large)}</div>'
        f'<div class="small">{"".join(small)}</div></section>'
    )


def custom_metrics(run: RunData) -> list[str]:
    """Return the metrics that no package of rollcast records and that changed with the steps, sorted."""
    drawn = {spec.metric for spec in (*LARGE, *SMALL)}
    names = (
        name
        for name in sorted(run.series)
        if name not in drawn
        and name not in _COMMON
        and not name.startswith(_COMMON_GROUPS)
        and not is_bound(name, run.series)
    )
    return [name for name in names if len(run.values(name)) > 1][:_MAX_CUSTOM]


def _phases(run: RunData) -> str:
    """Return the section with the shares of a step's time; empty with fewer than two phases."""
    means = {
        name.removeprefix("time/").removesuffix("_s").replace("_", " "): sum(values)
        for name in run.series
        if name.startswith("time/") and name.endswith("_s") and name != "time/step_s"
        if (values := run.values(name))
    }
    total = sum(means.values())
    if len(means) < 2 or total <= 0:
        return ""
    ranked = sorted(means.items(), key=lambda item: -item[1])
    bars, legend = [], []
    for index, (name, seconds) in enumerate(ranked):
        style = f"opacity:{max(0.14, 1 - 0.8 * index / max(1, len(ranked) - 1)):.2f}"
        share = f"{seconds / total * 100:.1f}"
        bars.append(f'<i style="width:{share}%;{style}"></i>')
        legend.append(f'<li><i style="{style}"></i><b>{html.escape(name)}</b> {share} %</li>')
    return (
        f'<h2>Where the time goes</h2><div class="card"><div class="phases" aria-hidden="true">{"".join(bars)}</div>'
        f'<ul class="legend">{"".join(legend)}</ul></div>'
    )


def _recoveries(run: RunData) -> str:
    """Return the table of recoveries from lost processes; empty if there were none."""
    if not run.recoveries:
        return ""
    rows = "".join(
        f"<tr><td>after step {_cell(recovery, 'failed_step')}</td><td>{_cell(recovery, 'step')}</td>"
        f"<td>{_cell(recovery, 'reason')}</td></tr>"
        for recovery in run.recoveries
    )
    return (
        f'<h2>Recoveries</h2><div class="card"><table><thead><tr><th>Lost</th><th>Went on from step</th>'
        f"<th>Reason</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _cell(record: Mapping[str, Any], key: str) -> str:
    return html.escape(str(record.get(key, "")))


def _details(run: RunData) -> str:
    rows = []
    for name in sorted(run.series):
        values = run.values(name)
        shown = (values[0], values[-1], min(values), max(values)) if values else ()
        cells = "".join(f"<td>{format_number(value)}</td>" for value in shown) or '<td colspan="4">not finite</td>'
        rows.append(f"<tr><td>{html.escape(name)}</td>{cells}</tr>")
    parts = []
    if rows:
        parts.append(
            f'<details><summary>All metrics ({len(rows)})</summary><div class="inner"><table><thead><tr>'
            "<th>Metric</th><th>First</th><th>Last</th><th>Lowest</th><th>Highest</th></tr></thead>"
            f"<tbody>{''.join(rows)}</tbody></table></div></details>"
        )
    if run.config:
        parts.append(f"<details><summary>Configuration</summary><pre>{html.escape(run.config)}</pre></details>")
    return "<h2>Details</h2>" + "".join(parts) if parts else ""


def render_page(run: RunData) -> str:
    """Return the whole report as one HTML page, which needs no other file and no network."""
    explorer = render_explorer(run)
    sections = [
        _header(run),
        _charts(run),
        _recoveries(run) + _phases(run) + render_timeline(run.timeline),
        render_memory(run) + render_sync(run),
        explorer,
        _details(run),
    ]
    return fill_page(
        f"{run.name} · rollcast",
        sections,
        "Written by rollcast from the run's metrics, samples, trajectories, status and config.yaml.",
        script=_asset("explorer.js") if explorer else "",
    )


def fill_page(title: str, sections: Sequence[str], footer: str, *, style: str = "", script: str = "") -> str:
    """Return one HTML page in the style of the report, which needs no other file and no network.

    Args:
        title: title of the window, as text.
        sections: HTML of the page from top to bottom; the caller has escaped what comes from outside.
        footer: last line, as text.
        style: further CSS.
        script: JavaScript to run after that of the report.
    """
    code = "\n".join(text.strip() for text in (_asset("report.js"), script) if text)
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    return Template(_asset("report.html")).substitute(
        title=html.escape(title),
        script_hash=f"sha256-{digest}",  # the browser runs no other script, whatever a response contains
        style="\n".join(text.strip() for text in (_asset("report.css"), style) if text),
        sections="\n".join(sections),
        footer=html.escape(footer, quote=False),
        script=code,
    )
