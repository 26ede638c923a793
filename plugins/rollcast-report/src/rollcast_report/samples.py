"""The sample table of a report, with the first and the last validation side by side."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rollcast_report.run_data import RunData, Validation

__all__ = ["render_samples"]

_MAX_ROWS = 200
_MAX_TEXT = 6000

_PAIR_KINDS = (
    ("fixed", "Became correct"),
    ("broken", "Became wrong"),
    ("right", "Both correct"),
    ("wrong", "Both wrong"),
)
_SINGLE_KINDS = (("right", "Correct"), ("wrong", "Wrong"))


def _is_correct(sample: Mapping[str, Any]) -> bool | None:
    """Return True if the answer counts as correct; None if the sample does not say."""
    correct = sample.get("correct")
    if correct is None:
        return None
    return bool(correct)


def _text(value: Any) -> str:
    """Return a prompt or answer as text, with chat messages one below the other."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(item, dict) and "content" in item for item in value):
        return "\n\n".join(f"{item.get('role', 'message')}: {_text(item['content'])}" for item in value)
    return json.dumps(value, ensure_ascii=False)


def _clipped(value: Any) -> str:
    text = _text(value)
    if len(text) > _MAX_TEXT:
        text = f"{text[:_MAX_TEXT]}\n… ({len(text) - _MAX_TEXT} more characters in samples.jsonl)"
    return f'<div class="text clip">{html.escape(text)}</div>'


def _pair(first: Validation, last: Validation) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return pairs of samples of two validations: for each prompt the n-th answers of both."""
    seen: Counter[str] = Counter()
    before: dict[tuple[str, int], dict[str, Any]] = {}
    for sample in first.samples:
        key = _text(sample.get("prompt"))
        before[key, seen[key]] = sample
        seen[key] += 1
    seen.clear()
    pairs = []
    for sample in last.samples:
        key = _text(sample.get("prompt"))
        if (key, seen[key]) in before:
            pairs.append((before[key, seen[key]], sample))
        seen[key] += 1
    return pairs


def _kind(samples: tuple[dict[str, Any], ...]) -> str:
    marks = [_is_correct(sample) for sample in samples]
    if None in marks:
        return "unknown"
    if len(marks) == 2 and marks[0] != marks[1]:
        return "fixed" if marks[1] else "broken"
    return "right" if marks[0] else "wrong"


def _answer(sample: Mapping[str, Any]) -> str:
    correct = _is_correct(sample)
    pill = ""
    if correct is not None:
        pill = f'<span class="pill {"good" if correct else "bad"}">{"correct" if correct else "wrong"}</span>'
    score = sample.get("score")
    shown = f"<span>score {score:g}</span>" if isinstance(score, int | float) and correct is None else ""
    if isinstance(score, int | float) and correct is not None and float(score) != float(correct):
        shown = f"<span>score {score:g}</span>"
    head = f'<div class="head">{pill}{shown}</div>' if pill or shown else ""
    return f"<td>{head}{_clipped(sample.get('response'))}</td>"


def _row(samples: tuple[dict[str, Any], ...]) -> str:
    truth = samples[-1].get("ground_truth")
    expected = (
        f'<div class="truth">Expected: {html.escape(_text(truth)[:_MAX_TEXT])}</div>' if truth is not None else ""
    )
    cells = "".join(_answer(sample) for sample in samples)
    return f'<tr data-kind="{_kind(samples)}"><td>{_clipped(samples[-1].get("prompt"))}{expected}</td>{cells}</tr>'


def _pick(rows: list[tuple[dict[str, Any], ...]]) -> list[tuple[dict[str, Any], ...]]:
    """Return at most 200 rows, evenly spaced over the validation set."""
    if len(rows) <= _MAX_ROWS:
        return rows
    return [rows[index * len(rows) // _MAX_ROWS] for index in range(_MAX_ROWS)]


def _heading(step: int) -> str:
    return "Before training" if step == 0 else f"Step {step}"


def render_samples(run: RunData) -> str:
    """Return the table of samples with its filters; empty if no validation has samples."""
    if run.first is None:
        return ""
    rows: list[tuple[dict[str, Any], ...]] = []
    shown = [run.first]
    if run.last is not None:
        rows = list(_pair(run.first, run.last))
        shown = [run.first, run.last]
    if not rows:  # a single validation, or two validations of different prompts
        shown = [run.last or run.first]
        rows = [(sample,) for sample in shown[0].samples]
    picked = _pick(rows)
    counts = Counter(_kind(row) for row in picked)
    kinds = _PAIR_KINDS if len(shown) == 2 else _SINGLE_KINDS
    buttons = [f'<button type="button" data-kind="all" aria-pressed="true">All<b>{len(picked)}</b></button>'] + [
        f'<button type="button" data-kind="{kind}" aria-pressed="false">{label}<b>{counts[kind]}</b></button>'
        for kind, label in kinds
    ]
    hint = ""
    if len(picked) < len(rows):
        hint = f'<p class="hint">{len(picked)} of {len(rows)} samples, evenly picked; all are in samples.jsonl.</p>'
    heads = "".join(f'<th scope="col">{_heading(validation.step)}</th>' for validation in shown)
    return (
        f'<section class="samples"><h2>Validation samples</h2><div class="filters" role="group" '
        f'aria-label="Filter samples">{"".join(buttons)}</div><div class="scroll"><table><thead><tr>'
        f'<th scope="col">Prompt</th>{heads}</tr></thead><tbody>{"".join(_row(row) for row in picked)}</tbody>'
        f"</table></div>{hint}</section>"
    )
