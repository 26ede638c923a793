"""Reading of validation samples for the report, a selection of whole validations that fits a page."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollcast_report.archive import Entry, PageLimits, clip_texts, evenly
from rollcast_report.records import Unreadable, read_records

__all__ = ["SAMPLES_FILE", "SavedSamples", "read_samples", "text_of"]

SAMPLES_FILE = "samples.jsonl"
#: The step of a line as the tracker ``jsonl`` writes it; a line in another style is parsed.
_STEP = re.compile(rb'\{"step": (-?\d+)[,}]')
#: Keys of a line that the page shows by itself; any other is listed under its name.
_KNOWN = frozenset(
    ("step", "prompt", "response", "ground_truth", "data_source", "finished", "score", "correct", "end", "messages")
)


@dataclass
class SavedSamples:
    """Validation samples for the report.

    Attributes:
        entries: samples of the shown validations, in order.
        total: number of samples in the file.
        validations: number of validations in the file.
        shown_validations: number of validations in ``entries``.
        unreadable: numbers of malformed lines.
    """

    entries: list[Entry] = field(default_factory=list)
    total: int = 0
    validations: int = 0
    shown_validations: int = 0
    unreadable: list[int] = field(default_factory=list)


def read_samples(path: Path, limits: PageLimits | None = None) -> SavedSamples:
    """Return samples up to the limit of a page: the first validation, the last one, and as many evenly between as fit.

    If not even two validations fit, samples are picked evenly from each.
    """
    limits = limits or PageLimits()
    saved = SavedSamples()
    counts = _count(path)
    saved.total, saved.validations = sum(counts.values()), len(counts)
    if not counts:
        return saved
    steps = _pick_steps(counts, limits.samples)
    saved.shown_validations = len(steps)
    # Where even the picked validations are too large, keep the same places of each, so that they can be compared.
    share = limits.samples // len(steps)
    rows_by_step = {step: set(evenly(range(counts[step]), share)) for step in steps}
    seen: Counter[int] = Counter()
    pairs = _Pairs(steps[0])
    for _, record in read_records(path):
        if isinstance(record, Unreadable):
            if not record.torn:
                saved.unreadable.append(record.line)
            continue
        step = record["step"]
        place, seen[step] = seen[step], seen[step] + 1
        if step in rows_by_step and place in rows_by_step[step]:
            saved.entries.append(pairs.entry(record))
    clip_texts(_texts(saved.entries), limits.characters, SAMPLES_FILE)
    return saved


def _count(path: Path) -> Counter[int]:
    """Return step → number of lines, without parsing lines of the usual style."""
    counts: Counter[int] = Counter()
    if not path.exists():
        return counts
    with path.open("rb") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                continue
            match = _STEP.match(raw)
            if match:
                counts[int(match[1])] += 1
                continue
            try:
                counts[int(json.loads(raw)["step"])] += 1
            except (ValueError, KeyError, TypeError, RecursionError):  # the second reading reports the line
                continue
    return counts


def _pick_steps(counts: Mapping[int, int], limit: int) -> list[int]:
    steps = sorted(counts)
    for many in range(len(steps), 2, -1):
        picked = evenly(steps, many)
        if sum(counts[step] for step in picked) <= limit:
            return list(picked)
    return [steps[0], steps[-1]] if len(steps) > 1 else steps


class _Pairs:
    """The answers of the first validation, by which later answers to the same prompt became correct or wrong."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._before: dict[str, bool | None] = {}
        self._seen: Counter[tuple[int, str]] = Counter()

    def entry(self, record: Mapping[str, Any]) -> Entry:
        step, prompt = record["step"], text_of(record.get("prompt"))
        place, self._seen[step, prompt] = self._seen[step, prompt], self._seen[step, prompt] + 1
        key = f"{place} {prompt}"
        correct = None if record.get("correct") is None else bool(record["correct"])
        flags = set()
        if step == self._first:
            self._before[key] = correct
        elif key in self._before and None not in (correct, self._before[key]) and correct != self._before[key]:
            flags.add("fixed" if correct else "broken")
        if record.get("error"):
            flags.add("failure")
        score = record.get("score")
        return Entry(
            kind="sample",
            step=step,
            reward=float(score) if isinstance(score, int | float) and not isinstance(score, bool) else None,
            correct=correct,
            source=str(record.get("data_source") or ""),
            end=_end(record),
            prompt=f"sample {key}",
            opening=prompt,
            flags=flags,
            detail={
                "prompt": prompt,
                "response": text_of(record.get("response")),
                "truth": text_of(record.get("ground_truth")),
                "more": {str(name): text_of(value) for name, value in record.items() if name not in _KNOWN},
            },
        )


def _end(record: Mapping[str, Any]) -> str:
    if record.get("end"):
        return str(record["end"])
    finished = record.get("finished")
    return "" if finished is None else "done" if finished else "length"


def text_of(value: Any) -> str:
    """Return a prompt or answer as text, with chat messages one below the other; empty for None."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if _is_chat(value):
        return "\n\n".join(f"{item.get('role', 'message')}: {text_of(item['content'])}" for item in value)
    return json.dumps(value, ensure_ascii=False)


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(isinstance(item, dict) and "content" in item for item in value)
    )


def _texts(entries: Sequence[Entry]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the holder and key of each text of samples."""
    for entry in entries:
        for key in ("prompt", "response", "truth"):
            yield entry.detail, key
        for name in entry.detail["more"]:
            yield entry.detail["more"], name
