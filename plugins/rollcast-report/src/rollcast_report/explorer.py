"""The explorer of samples and trajectories: its data, and the frame that ``explorer.js`` fills in the browser."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from rollcast_report.archive import Entry, pack
from rollcast_report.run_data import RunData
from rollcast_report.samples import SAMPLES_FILE
from rollcast_report.trajectories import FOLDER

__all__ = ["render_explorer"]

#: Names of the flags in the filter "Show"; the flags themselves are in ``archive.FLAGS``.
_FLAGS = (
    ("calls", "with tool calls"),
    ("errors", "with tool errors"),
    ("failure", "that failed"),
    ("contexts", "of rollouts with several contexts"),
    ("untrained", "that took no part in the update"),
)
_RESULTS = (
    ("right", "correct"),
    ("wrong", "wrong"),
    ("fixed", "became correct since the first validation"),
    ("broken", "became wrong since the first validation"),
    ("unknown", "not said"),
)
_ORDERS = (
    ("recorded", "as recorded"),
    ("latest", "latest step first"),
    ("low", "lowest reward first"),
    ("high", "highest reward first"),
    ("turns", "most turns first"),
    ("tokens", "most tokens first"),
)


def render_explorer(run: RunData) -> str:
    """Return the section with search, filters, list and detail; empty if the run has no samples and trajectories."""
    entries = [*run.trajectories.entries, *run.samples.entries]
    if not entries:
        return ""
    kinds = {entry.kind for entry in entries}
    title = "Samples and trajectories" if len(kinds) > 1 else "Trajectories"
    title = "Validation samples" if kinds == {"sample"} else title
    index, blocks = pack(entries)
    data = "".join(
        f'<script type="application/octet-stream" class="explorer-block">{block}</script>' for block in blocks
    )
    return (
        f'<section class="explorer" aria-labelledby="explorer-title"><h2 id="explorer-title">{title}</h2>'
        f'<noscript><p class="hint">This part needs JavaScript; the files are {SAMPLES_FILE} and {FOLDER}/.</p>'
        f'</noscript><form class="controls" role="search" aria-label="Filters">{_controls(entries, kinds)}</form>'
        '<div class="panes"><div id="explorer-list" role="listbox" tabindex="0" aria-label="Entries that match">'
        '<div id="explorer-rows" role="presentation"></div></div>'
        '<div id="explorer-detail" role="region" tabindex="0" aria-label="Chosen entry"></div></div>'
        f'{_hint(run)}<script type="application/octet-stream" id="explorer-index">{index}</script>{data}</section>'
    )


def _controls(entries: Sequence[Entry], kinds: set[str]) -> str:
    sources = sorted({entry.source for entry in entries} - {""})
    ends = sorted({entry.end for entry in entries} - {""})
    flags = {name for entry in entries for name in entry.flags}
    parts = [
        '<label class="wide">Search in all texts<input type="search" id="explorer-search" autocomplete="off" '
        'placeholder="any text, without regard to case"></label>'
    ]
    if len(kinds) > 1:
        parts.append(_select("kind", "Kind", [("", "all"), ("trajectory", "trajectories"), ("sample", "samples")]))
    parts += [_range("step", "Step", "1"), _range("reward", "Reward", "any")]
    if sources:
        parts.append(_select("source", "Data source", [("", "all"), *((source, source) for source in sources)]))
    if ends:
        parts.append(_select("end", "End", [("", "any"), *((end, end) for end in ends)]))
    if any(entry.correct is not None for entry in entries):
        results = [option for option in _RESULTS if option[0] not in ("fixed", "broken") or option[0] in flags]
        parts.append(_select("result", "Result", [("", "any"), *results]))
    if any(entry.age is not None for entry in entries):
        parts.append(_range("age", "Age in weight versions", "1"))
    shown = [option for option in _FLAGS if option[0] in flags]
    if shown:
        parts.append(_select("flag", "Show", [("", "all"), *shown]))
    parts.append(_select("order", "Order", _ORDERS))
    parts.append('<button type="reset">Reset</button><span id="explorer-count" role="status"></span>')
    return "".join(parts)


def _select(name: str, label: str, options: Iterable[tuple[str, str]]) -> str:
    shown = "".join(f'<option value="{html.escape(value)}">{html.escape(text)}</option>' for value, text in options)
    return f'<label>{label}<select id="explorer-{name}">{shown}</select></label>'


def _range(name: str, label: str, step: str) -> str:
    def bound(end: str, word: str) -> str:
        return (
            f'<input type="number" step="{step}" id="explorer-{name}-{end}" aria-label="{label}, {word}" '
            f'placeholder="{word}">'
        )

    return f"<fieldset><legend>{label}</legend>{bound('low', 'from')}{bound('high', 'to')}</fieldset>"


def _hint(run: RunData) -> str:
    notes = []
    saved, samples = run.trajectories, run.samples
    if saved.shown_steps < saved.steps or saved.is_cut:
        notes.append(
            f"Up to {saved.limit:,} trajectories of each of {saved.shown_steps:,} of the {saved.steps:,} recorded "
            f"steps; all are in {FOLDER}."
        )
    if len(samples.entries) < samples.total:
        notes.append(
            f"{len(samples.entries):,} of {samples.total:,} samples, of {samples.shown_validations:,} of "
            f"{samples.validations:,} validations; all are in {SAMPLES_FILE}."
        )
    return "".join(f'<p class="hint">{note}</p>' for note in notes)
