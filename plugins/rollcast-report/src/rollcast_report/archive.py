"""The samples and trajectories of a page in compressed blocks, which the browser opens one by one.

The index has one column per property of an entry, so that lists and filters need no text. Texts are in blocks of about
256 kB before compression: the browser reads them in the background for the search, and keeps only what it searches.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

__all__ = ["FLAGS", "Entry", "PageLimits", "clip_texts", "evenly", "pack"]

T = TypeVar("T")

#: Properties of an entry that it has or has not, in the order of their bits.
FLAGS = ("calls", "errors", "failure", "contexts", "untrained", "fixed", "broken")
_BLOCK_CHARACTERS = 256_000
_OPENING = 140
#: Characters that one text may have; the largest with which all texts fit the page.
_CLIPS = (20_000, 10_000, 6_000, 4_000, 3_000, 2_000, 1_500, 1_000, 700, 400, 200)


@dataclass(frozen=True)
class PageLimits:
    """Limits of one page.

    Attributes:
        trajectories: most trajectories.
        steps: most training steps from which trajectories are taken.
        samples: most validation samples.
        characters: most characters of trajectories, and of samples.
    """

    trajectories: int = 10_000
    steps: int = 200
    samples: int = 10_000
    characters: int = 40_000_000

    @classmethod
    def live(cls) -> PageLimits:
        """Return the limits for a page that is written while a run goes on and waits for it."""
        return cls(trajectories=1_000, steps=20, samples=2_000, characters=6_000_000)


@dataclass
class Entry:
    """One sample or trajectory.

    Attributes:
        kind: ``sample`` or ``trajectory``.
        step: step of the validation or of training.
        reward: its score; None if it has none.
        correct: True if the answer counts as correct; None if the file does not say.
        source: data source of the task; may be empty.
        end: reason for its end; empty if unknown.
        age: age of its oldest token in weight versions; None if unknown.
        turns, tokens, sampled: number of turns, of all tokens and of sampled ones; 0 if unknown.
        prompt: key that it shares with other answers to the same prompt.
        opening: text shown in the list, cut to 140 characters.
        flags: names in ``FLAGS``.
        detail: texts and other facts, as read by ``assets/explorer.js``.
    """

    kind: str
    step: int
    reward: float | None
    correct: bool | None
    source: str
    end: str
    prompt: str
    opening: str
    detail: dict[str, Any]
    age: int | None = None
    turns: int = 0
    tokens: int = 0
    sampled: int = 0
    flags: set[str] = field(default_factory=set)


def evenly(items: Sequence[T], count: int) -> Sequence[T]:
    """Return at most ``count`` items, evenly spaced and including both ends."""
    if len(items) <= count:
        return items
    if count < 2:
        return items[-1:] if count else items[:0]
    return [items[index * (len(items) - 1) // (count - 1)] for index in range(count)]


def clip_texts(texts: Iterable[tuple[dict[str, Any], str]], limit: int, where: str) -> None:
    """Shorten the longest texts until all have at most ``limit`` characters, and say where the rest is.

    Args:
        texts: holder and key of each text.
        limit: number of characters of all texts.
        where: file or folder with the whole texts.
    """
    values = list(texts)
    lengths = [len(holder[key]) for holder, key in values]
    clip = next(
        (limit_length for limit_length in _CLIPS if sum(min(length, limit_length) for length in lengths) <= limit),
        _CLIPS[-1],
    )
    for (holder, key), length in zip(values, lengths, strict=True):
        if length > clip:
            holder[key] = f"{holder[key][:clip]}\n… ({length - clip:,} more characters in {where})"


def pack(entries: Sequence[Entry]) -> tuple[str, list[str]]:
    """Return the index and the blocks of texts, each as base64 of zlib-compressed JSON."""
    starts, blocks = [], []
    for start, block in _blocks(entries):
        starts.append(start)
        blocks.append(_compress(block))
    return _compress(_to_json(_index(entries, starts))), blocks


def _index(entries: Sequence[Entry], starts: list[int]) -> dict[str, Any]:
    numbers: dict[str, dict[str, int]] = {"kind": {}, "source": {}, "end": {}, "prompt": {}}

    def number(column: str, value: str) -> int:
        return numbers[column].setdefault(value, len(numbers[column]))

    columns: dict[str, list[Any]] = {
        "kind": [number("kind", entry.kind) for entry in entries],
        "source": [number("source", entry.source) for entry in entries],
        "end": [number("end", entry.end) for entry in entries],
        "prompt": [number("prompt", entry.prompt) for entry in entries],
        "step": [entry.step for entry in entries],
        "reward": [_finite(entry.reward) for entry in entries],
        "correct": [None if entry.correct is None else int(entry.correct) for entry in entries],
        "age": [entry.age for entry in entries],
        "turns": [entry.turns for entry in entries],
        "tokens": [entry.tokens for entry in entries],
        "sampled": [entry.sampled for entry in entries],
        "flags": [sum(1 << place for place, name in enumerate(FLAGS) if name in entry.flags) for entry in entries],
        "opening": [" ".join(entry.opening[: 2 * _OPENING].split())[:_OPENING] for entry in entries],
    }
    names = {f"{column}Names": list(values) for column, values in numbers.items() if column != "prompt"}
    return {"count": len(entries), "starts": starts, "flagNames": FLAGS, **names, **columns}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _blocks(entries: Sequence[Entry]) -> Iterator[tuple[int, str]]:
    """Yield the place of the first entry and the JSON of the details of each block."""
    start, size, parts = 0, 0, list[str]()
    for place, row in enumerate(entries):
        text = _to_json(row.detail)
        if parts and size + len(text) > _BLOCK_CHARACTERS:
            yield start, f"[{','.join(parts)}]"
            start, size, parts = place, 0, []
        parts.append(text)
        size += len(text)
    if parts:
        yield start, f"[{','.join(parts)}]"


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _compress(text: str) -> str:
    # A lone surrogate has no UTF-8 form; its backslash form is the JSON escape of the same character.
    return base64.b64encode(zlib.compress(text.encode("utf-8", "backslashreplace"), 6)).decode()
