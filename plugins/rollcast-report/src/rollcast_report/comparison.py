"""Several runs on one page: a line for each run over the same axes, their figures and what their settings differ in."""

from __future__ import annotations

import html
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollcast.contracts.files import replace_file
from rollcast.errors import DataError
from rollcast_report.charts import ChartSpec, Line, format_number, mark_shape, render_lines
from rollcast_report.intervals import find_band
from rollcast_report.page import LARGE, SMALL, custom_metrics, describe_time, fill_page
from rollcast_report.panels import add_sync_bytes
from rollcast_report.run_data import RunData, hide_secrets, read_run
from rollcast_report.settings import differing_keys, read_settings

__all__ = ["MOST_RUNS", "write_comparison"]

#: Lines that can be told apart: eight colours, each with a dash pattern and a mark of its own.
MOST_RUNS = 8
_PANEL = (
    ChartSpec("sync/seconds", "Weight sync", "s", floor=0.0),
    ChartSpec("perf/max_memory_allocated_gb", "Memory of the device", "GB", floor=0.0),
    ChartSpec("perf/cpu_memory_used_gb", "Resident memory", "GB", floor=0.0),
)


@dataclass(frozen=True)
class _Compared:
    name: str
    style: int
    run: RunData
    #: Settings by dotted key; None if config.yaml cannot be read.
    settings: Mapping[str, Any] | None


def write_comparison(paths: Sequence[Path], output: Path) -> Path:
    """Write a page that compares runs.

    Args:
        paths: run directories.
        output: file to write.

    Raises:
        DataError: there are more runs than a chart can show.
        OSError: the file cannot be written.
    """
    if len(paths) > MOST_RUNS:
        raise DataError(f"{len(paths)} runs are too many for one page, whose lines have {MOST_RUNS} styles; name fewer")
    runs = []
    for style, (path, name) in enumerate(zip(paths, _names(paths), strict=True)):
        run = read_run(path, parts=("metrics", "recoveries"))
        add_sync_bytes(run)
        try:
            settings: Mapping[str, Any] | None = read_settings(path)
        except DataError as error:
            settings = None
            run.notes.append(str(error))
        runs.append(_Compared(name, style, run, settings))
    replace_file(output, _render(runs))
    return output


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that differ from each other."""
    whole = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, whole)) + 1):
        names = ["/".join(parts[-length:]) for parts in whole]
        if len(set(names)) == len(names):
            return names
    return [f"{number}: {path}" for number, path in enumerate(paths, 1)]  # the same run twice


def _render(runs: Sequence[_Compared]) -> str:
    title = f"{len(runs)} runs compared"
    notes = "".join(
        f'<p class="note">{html.escape(run.name)}: {html.escape(n)}</p>' for run in runs for n in run.run.notes
    )
    sections = [
        f'<header><div class="title"><h1>{title}</h1></div>{notes}</header>',
        _table(runs),
        _charts(runs),
        _settings(runs),
    ]
    return fill_page(title, sections, "Written by rollcast from the runs' metrics, status and config.yaml.")


def _key(run: _Compared) -> str:
    """Return the line of a run with its name, as it looks in the charts."""
    sample = (
        '<svg class="key" viewBox="0 0 44 12" width="44" height="12" aria-hidden="true">'
        f'<path class="line c{run.style}" d="M1 6H43"/>{mark_shape(22.0, 6.0, run.style)}</svg>'
    )
    return f"{sample}{html.escape(run.name)}"


def _table(runs: Sequence[_Compared]) -> str:
    heads = ("Run", "State", "Steps", "Wall time", "Median step", "Last reward", "Last accuracy", "Best accuracy")
    rows = []
    for other in runs:
        run = other.run
        reward, accuracy = run.values("reward/mean"), run.values("val/accuracy")
        times = run.values("time/step_s")
        cells = [
            run.status.state,
            f"{run.steps or 0:,}",
            describe_time(run.status.elapsed_s) if run.status.elapsed_s else "-",
            f"{statistics.median(times):.3g} s" if times else "-",
            format_number(reward[-1]) if reward else "-",
            _accuracy(run) if accuracy else "-",
            format_number(max(accuracy), "%") if accuracy else "-",
        ]
        shown = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        rows.append(f'<tr><th scope="row">{_key(other)}</th>{shown}</tr>')
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    return (
        f'<section class="card scroll" aria-label="Runs"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></section>"
    )


def _accuracy(run: RunData) -> str:
    last = format_number(run.values("val/accuracy")[-1], "%")
    band = find_band("val/accuracy", run.series)
    if band is None:
        return last
    _, low, high = band.points[-1]
    return f"{last} ({format_number(low, '%')} to {format_number(high, '%')})"


def _charts(runs: Sequence[_Compared]) -> str:
    steps = [run.run.steps for run in runs if run.run.steps is not None]
    if not steps:
        return '<p class="card empty">None of these runs has metrics yet.</p>'
    custom = sorted({name for run in runs for name in custom_metrics(run.run)})
    large = [_chart(runs, spec, 560, 290, max(steps)) for spec in LARGE]
    specs = [*SMALL, *_PANEL, *(ChartSpec(name, name) for name in custom)]
    small = [_chart(runs, spec, 360, 190, max(steps)) for spec in specs]
    legend = "".join(f"<li>{_key(run)}</li>" for run in runs)
    return (
        f'<h2>Curves</h2><section aria-label="Curves"><ul class="legend keys">{legend}</ul>'
        f'<div class="large">{"".join(large)}</div><div class="small">{"".join(small)}</div></section>'
    )


def _chart(runs: Sequence[_Compared], spec: ChartSpec, width: int, height: int, x_max: int) -> str:
    lines = [
        Line(run.name, run.style, run.run.series[spec.metric], find_band(spec.metric, run.run.series))
        for run in runs
        if run.run.values(spec.metric)
    ]
    return render_lines(lines, spec, width, height, x_max) if lines else ""


def _settings(runs: Sequence[_Compared]) -> str:
    known = [run for run in runs if run.settings is not None]
    if len(known) < 2:
        return ""
    keys = differing_keys([run.settings or {} for run in known])
    if not keys:
        return '<h2>Settings</h2><p class="card">The configurations do not differ.</p>'
    heads = "".join(f'<th scope="col">{_key(run)}</th>' for run in known)
    rows = []
    for key in keys:
        cells = "".join(f"<td>{_value(key, run.settings or {})}</td>" for run in known)
        rows.append(f'<tr><th scope="row"><code>{html.escape(key)}</code></th>{cells}</tr>')
    return (
        '<h2>Settings that differ</h2><section class="card scroll" aria-label="Settings that differ"><table><thead><tr>'
        f'<th scope="col">Key</th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></section>'
    )


def _value(key: str, settings: Mapping[str, Any]) -> str:
    if key not in settings:
        return "-"
    text = json.dumps(settings[key], ensure_ascii=False, default=str)
    return html.escape(hide_secrets(f"{key}: {text}").partition(": ")[2])
