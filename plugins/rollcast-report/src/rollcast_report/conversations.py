"""The trajectories of a report: their data, and the frame that ``assets/trajectories.js`` fills in the browser."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollcast_report.run_data import RunData
from rollcast_report.trajectories import FOLDER

__all__ = ["render_trajectories"]

#: Properties that trajectories are filtered by; ``trajectories.js`` decides which trajectory has which.
_FILTERS = (
    ("calls", "with tool calls"),
    ("errors", "with tool errors"),
    ("failure", "that failed"),
    ("contexts", "of rollouts with several contexts"),
    ("positive", "with a reward above 0"),
    ("other", "with a reward of 0 or below"),
    ("unscored", "without a reward"),
    ("untrained", "that took no part in the update"),
)
_ORDERS = (
    ("recorded", "as recorded"),
    ("low", "lowest reward first"),
    ("high", "highest reward first"),
    ("turns", "most turns first"),
    ("tokens", "most tokens first"),
)


def render_trajectories(run: RunData) -> str:
    """Return the section with search, filters, list and conversation; empty if the run saved no trajectories."""
    shown = run.trajectories.shown
    if not shown:
        return ""
    steps = sorted({each["step"] for each in shown})
    ends = sorted({each["end"] for each in shown})
    controls = (
        '<input type="search" id="trajectory-search" placeholder="Search in all conversations" '
        'aria-label="Search in all conversations">'
        + _select("step", "Step", [("", "all steps"), *((step, f"step {step}") for step in steps)])
        + _select("end", "End", [("", "any end"), *((end, f"end: {end}") for end in ends)])
        + _select("kind", "Show", [("", "all trajectories"), *_FILTERS])
        + _select("order", "Order", _ORDERS)
        + '<span id="trajectory-count" role="status"></span>'
    )
    return (
        '<section class="trajectories" aria-label="Trajectories"><h2>Trajectories</h2>'
        f'<noscript><p class="hint">This part needs JavaScript; the files are in {FOLDER}.</p></noscript>'
        f'<div class="controls">{controls}</div><div class="panes"><div id="trajectory-list" role="listbox" '
        'tabindex="0" aria-label="List of trajectories"></div><div id="trajectory" aria-live="polite"></div></div>'
        f'{_hint(run)}<script type="application/json" id="trajectory-data">{_data(shown)}</script></section>'
    )


def _select(name: str, label: str, options: Iterable[tuple[Any, str]]) -> str:
    shown = "".join(
        f'<option value="{html.escape(str(value))}">{html.escape(text)}</option>' for value, text in options
    )
    return f'<select id="trajectory-{name}" aria-label="{label}">{shown}</select>'


def _hint(run: RunData) -> str:
    saved = run.trajectories
    if saved.shown_steps == saved.steps and not saved.is_cut:
        return ""
    return (
        f'<p class="hint">Up to {saved.limit:,} trajectories of each of {saved.shown_steps:,} of the {saved.steps:,} '
        f"recorded steps; all are in {FOLDER}.</p>"
    )


def _data(shown: Sequence[Mapping[str, Any]]) -> str:
    """Return JSON that cannot end the element it stands in: a browser looks for ``</script`` and ``<!--`` there."""
    return json.dumps(shown, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
