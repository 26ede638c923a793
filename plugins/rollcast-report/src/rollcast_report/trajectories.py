"""Reading of saved trajectories for the report: conversations and the tokens that were trained.

The files are those of ``rollcast_agents.records``: ``trajectories/step_000012.jsonl``, one trajectory a line. They are
read as JSON, so that a report needs no plugin for agents.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rollcast_report.archive import Entry, PageLimits, clip_texts, evenly

__all__ = ["FOLDER", "FORMAT_VERSION", "SavedTrajectories", "read_trajectories", "turns_of_messages"]

FOLDER = "trajectories"
FORMAT_VERSION = 1
_STEP = re.compile(r"step_(\d+)\.jsonl")
#: Ends of rollouts that are left out of the update.
_FAILED = ("error", "timeout", "aborted")


@dataclass
class SavedTrajectories:
    """Trajectories for the report.

    Attributes:
        entries: shown trajectories, in the order of their steps.
        steps: number of steps that have a file.
        shown_steps: number of steps in ``entries``.
        limit: largest number of trajectories of one step in ``entries``.
        is_cut: True if one of these steps has more.
        unreadable: file name → numbers of lines that are no trajectory of this format.
    """

    entries: list[Entry] = field(default_factory=list)
    steps: int = 0
    shown_steps: int = 0
    limit: int = 0
    is_cut: bool = False
    unreadable: dict[str, list[int]] = field(default_factory=dict)


def read_trajectories(
    run_dir: Path, limits: PageLimits | None = None, versions: Mapping[int, float] | None = None
) -> SavedTrajectories:
    """Return the first trajectories of the first step, the last one, and others evenly between.

    Args:
        run_dir: directory of the run.
        limits: limits of the page.
        versions: step → weight version after its update, which tell the age of the next step's tokens.
    """
    limits = limits or PageLimits()
    rollouts = sorted(
        (int(match[1]), path) for path in (run_dir / FOLDER).glob("*") if (match := _STEP.fullmatch(path.name))
    )
    picked = evenly(rollouts, limits.steps)
    saved = SavedTrajectories(steps=len(rollouts), shown_steps=len(picked))
    if not picked:
        return saved
    saved.limit = limits.trajectories // len(picked)
    for step, path in picked:
        of_step: list[Entry] = []
        # Read only the shown lines, because a file may have gigabytes.
        with path.open("rb") as file:
            for number, line in enumerate(islice(file, saved.limit), 1):
                try:
                    of_step.append(_entry(step, json.loads(line)))
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    saved.unreadable.setdefault(path.name, []).append(number)
            saved.is_cut |= bool(file.read(1))
        _complete(of_step, _version_at(step, of_step, versions or {}))
        saved.entries += of_step
    clip_texts(_texts(saved.entries), limits.characters, f"the run's folder {FOLDER}")
    return saved


def _version_at(step: int, entries: Sequence[Entry], versions: Mapping[int, float]) -> int:
    """Return the weight version at the start of a step: as recorded, else the newest that sampled a token of it."""
    newest = max((version for entry in entries for version in _versions(entry)), default=0)
    return max(newest, int(versions.get(step - 1, 0)))


def _versions(entry: Entry) -> Iterator[int]:
    for segment in entry.detail["segments"]:
        yield from segment.get("versions", ())


def _complete(entries: Sequence[Entry], version: int) -> None:
    """Set what depends on the other trajectories of the step: the age of the tokens, and rollouts of several rows."""
    rows = Counter(record.detail["rollout"] for record in entries)
    for entry in entries:
        oldest = min(_versions(entry), default=None)
        # A version below 0 marks tokens of unknown weights.
        entry.age = None if oldest is None or oldest < 0 else max(0, version - oldest)
        if rows[entry.detail["rollout"]] > 1:
            entry.flags.add("contexts")


def _entry(step: int, data: Mapping[str, Any]) -> Entry:
    """Convert a line to an entry of the page.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the line is no trajectory of this format.
    """
    if data["version"] != FORMAT_VERSION:
        raise ValueError(f"version {data['version']} of the format")
    segments = [_segment(segment) for segment in data["segments"]]
    messages = [_message(message) for message in data["messages"]]
    for position, turn in turns_of_messages(messages, segments).items():
        messages[position]["turn"] = turn
    failure = data["failure"]
    # A trajectory without a score is not in the batch of the update; one of a failed rollout has no trained tokens.
    is_trained = data["score"] is not None and failure is None and data["end"] not in _FAILED
    metrics, components = _numbers(data["metrics"]), _numbers(data["reward_components"])
    sampled = [segment for segment in segments if segment["sampled"]]
    entry = Entry(
        kind="trajectory",
        step=step,
        reward=_number(data["reward"] if data["score"] is None else data["score"]),
        correct=_correct(data, components),
        source=_text(data["task"].get("data_source")),
        end=str(data["end"]),
        prompt=f"trajectory {step} {data['group_id']}",
        opening=_opening(messages, segments) or str(data["rollout_id"]),
        turns=len({segment["turn"] for segment in sampled}),
        tokens=sum(segment["tokens"] for segment in segments),
        sampled=sum(segment["tokens"] for segment in sampled),
        detail={
            "group": str(data["group_id"]),
            "rollout": str(data["rollout_id"]),
            "trained": is_trained,
            "turnRewards": {str(int(turn)): _number(value) for turn, value in data["turn_rewards"].items()},
            "components": components,
            "metrics": metrics,
            "failure": None if failure is None else [str(failure["boundary"]), str(failure["message"])],
            "truth": _text(data["task"].get("ground_truth")),
            "messages": messages,
            "segments": segments,
        },
    )
    named = {
        "calls": (metrics.get("tool_calls") or 0) > 0 or any("calls" in message for message in messages),
        "errors": (metrics.get("tool_errors") or 0) > 0,
        "failure": failure is not None,
        "untrained": not is_trained,
    }
    entry.flags = {name for name, holds in named.items() if holds}
    return entry


def _correct(data: Mapping[str, Any], components: Mapping[str, float | None]) -> bool | None:
    """Return True if the reward said that the answer is correct; None if it did not say."""
    said = data["extra"].get("correct") if isinstance(data.get("extra"), dict) else None
    if said is None:
        said = components.get("correct")
    return None if said is None else bool(said)


def _opening(messages: Sequence[Mapping[str, Any]], segments: Sequence[Mapping[str, Any]]) -> str:
    asked = next((message for message in messages if message["role"] == "user"), messages[0] if messages else None)
    if asked is not None:
        return str(asked["text"])
    return str(segments[0]["text"] or "") if segments else ""


def _segment(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return one segment with the number of its tokens in place of their ids."""
    count = len(base64.b64decode(data["token_ids"], validate=True)) // 4
    sampled = bool(data["sampled"])
    shown: dict[str, Any] = {"turn": int(data["turn"]), "sampled": sampled, "tokens": count}
    shown["text"] = _optional_text(data["text"])
    if sampled:
        shown["versions"] = [int(version) for version, _ in data["weight_versions"]]
        shown["logProb"] = _mean(data["log_probs"])
    return shown


def _mean(packed: str) -> float | None:
    """Return the mean of base64 of little-endian float32; None for no number, or for one that is not finite."""
    raw = base64.b64decode(packed, validate=True)
    if not raw or len(raw) % 4:
        if raw:
            raise binascii.Error(f"{len(raw)} bytes are no float32")
        return None
    values = array("f", raw)
    if sys.byteorder == "big":
        values.byteswap()
    return _number(sum(values) / len(values))


def _message(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of OpenAI's chat format with its content as text."""
    shown: dict[str, Any] = {"role": str(data["role"]), "text": _text(data.get("content"))}
    if reasoning := _text(data.get("reasoning_content")):
        shown["reasoning"] = reasoning
    if calls := data.get("tool_calls"):
        shown["calls"] = [_call(call) for call in calls]
    for key, name in (("name", "name"), ("tool_call_id", "callId")):
        if data.get(key):
            shown[name] = str(data[key])
    return shown


def _call(data: Mapping[str, Any]) -> dict[str, Any]:
    function = data.get("function") or {}
    arguments = function.get("arguments")
    return {"name": _text(function.get("name")), "arguments": _text(arguments), "id": _text(data.get("id"))}


def _text(value: Any) -> str:
    """Return the text of a message's content, or the JSON of any other value; empty for None."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(part, dict) and "type" in part for part in value):
        return "\n".join(_text(part.get("text", f"({part['type']})")) for part in value)
    return json.dumps(value, ensure_ascii=False)


def _optional_text(value: Any) -> str | None:
    return None if value is None else _text(value)


def _number(value: Any) -> float | None:
    """Return a number that JSON has; None for None, infinities and NaN.

    Raises:
        TypeError: the value is no number.
    """
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r:.60} is no number")
    return float(value) if abs(value) < float("inf") else None


def _numbers(values: Mapping[str, Any]) -> dict[str, float | None]:
    return {str(name): _number(value) for name, value in values.items()}


def turns_of_messages(messages: Sequence[Mapping[str, Any]], segments: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Return position → turn for the assistant's messages that this trajectory sampled.

    A conversation may start with replies that were not sampled (examples in the prompt), and a trajectory whose context
    was rewritten has only some of the rollout's replies. So messages and sampled turns are matched by their texts, from
    the last one backwards. Without texts, they are matched by number, if there are at least as many replies as turns.
    """
    texts: dict[int, str | None] = {}
    for segment in segments:
        if segment["sampled"]:
            known = texts.get(segment["turn"], "")
            texts[segment["turn"]] = None if known is None or segment["text"] is None else known + segment["text"]
    turns = sorted(texts)
    replies = [position for position, message in enumerate(messages) if message["role"] == "assistant"]
    if any(text is None for text in texts.values()):
        return dict(zip(replies[-len(turns) :], turns, strict=True)) if 0 < len(turns) <= len(replies) else {}
    matched: dict[int, int] = {}
    for position in reversed(replies):
        fitting = [index for index, turn in enumerate(turns) if _is_reply(messages[position], texts[turn] or "")]
        if fitting:
            matched[position] = turns[fitting[-1]]
            turns = turns[: fitting[-1]]
    return matched


def _is_reply(message: Mapping[str, Any], sampled: str) -> bool:
    """Return True if the sampled text holds what the message says."""
    said = [message["text"].strip(), message.get("reasoning", "").strip()]
    said += [call["name"] for call in message.get("calls", ())]
    return all(part in sampled for part in said)


def _texts(entries: Sequence[Entry]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the holder and key of each text."""
    for entry in entries:
        yield entry.detail, "truth"
        for message in entry.detail["messages"]:
            yield message, "text"
            if "reasoning" in message:
                yield message, "reasoning"
            for call in message.get("calls", ()):
                yield call, "arguments"
        for segment in entry.detail["segments"]:
            if segment["text"] is not None:
                yield segment, "text"
