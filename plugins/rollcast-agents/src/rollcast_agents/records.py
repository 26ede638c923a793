"""Trajectories in files: JSON Lines, one trajectory per line, for reports and for rescoring without a model.

A run writes ``<run_dir>/trajectories/step_000012.jsonl``. Each line is an object with these keys::

    version           1
    group_id, rollout_id, end, reward, turn_rewards, reward_components, messages, metrics, failure, extra
                      as in contracts.trajectory.Trajectory; turn_rewards has turns as strings, failure is
                      null or {"boundary", "message"}
    segments          [{"turn", "sampled", "token_ids", "log_probs", "weight_versions", "text"}], in order; token_ids is
                      base64 of little-endian int32, log_probs of float32 (null for given tokens), weight_versions
                      [[version, tokens], ...]; text is decoded, or null
    task              fields of the dataset row that rewards read: ground_truth, data_source, extra_info
    score             sum of the rewards that the rollout was trained with; null if it was not scored

The arrays are exact: a loaded trajectory yields the same batch as the saved one. Values that JSON does not support are
written as text.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rollcast.errors import DataError
from rollcast_agents.contracts.trajectory import Failure, Segment, Trajectory, VersionRun

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "FOLDER",
    "Record",
    "append_records",
    "decode_segments",
    "find_records",
    "keep_groups",
    "load_records",
    "load_trajectories",
    "record_path",
    "save_records",
    "save_trajectories",
]

FOLDER = "trajectories"
"""Folder of the files in a run directory."""
_VERSION = 1
_INTS, _FLOATS, _SHORTS = np.dtype("<i4"), np.dtype("<f4"), np.dtype("<i2")


@dataclass(frozen=True, eq=False)
class Record:
    """A trajectory and the additional data in its file.

    Attributes:
        trajectory: the sampled trajectory.
        task: fields of the dataset's row: ``ground_truth``, ``data_source``, ``extra_info``.
        score: sum of the rewards that its rollout was trained with; None if it was not scored.
        texts: decoded text of each segment; empty if unknown.
    """

    trajectory: Trajectory
    task: Mapping[str, Any] = field(default_factory=dict)
    score: float | None = None
    texts: Sequence[str] = ()


def record_path(run_dir: Path, step: int) -> Path:
    """Return the file of a training step's trajectories."""
    return run_dir / FOLDER / f"step_{step:06d}.jsonl"


def save_trajectories(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write trajectories without tasks, scores and texts; see :func:`save_records`."""
    save_records(path, [Record(trajectory) for trajectory in trajectories])


def save_records(path: Path, records: Iterable[Record]) -> None:
    """Write a file atomically; its folder is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    with unfinished.open("w", encoding="utf-8") as file:
        file.writelines(map(_line, records))
    os.replace(unfinished, path)


def append_records(path: Path, records: Iterable[Record]) -> None:
    """Append to a file; the file and its folder are created if they are missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(map(_line, records))
        file.flush()
        os.fsync(file.fileno())


def keep_groups(path: Path, groups: Collection[str]) -> None:
    """Remove trajectories of other groups and an incomplete last line from a file; do nothing if the file is
    missing.
    """
    if not path.is_file():
        return
    unfinished = path.with_name(path.name + ".part")
    with path.open(encoding="utf-8") as before, unfinished.open("w", encoding="utf-8") as after:
        for line in before:
            # Only an interrupted append leaves a line without an end.
            if line.endswith("\n") and json.loads(line)["group_id"] in groups:
                after.write(line)
    os.replace(unfinished, path)


def decode_segments(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text of each segment, so that readers of the file need no tokenizer."""
    ids = [segment.token_ids.tolist() for segment in trajectory.segments]
    return [str(tokenizer.decode(segment_ids, skip_special_tokens=False)) for segment_ids in ids]


def load_trajectories(path: Path) -> list[Trajectory]:
    """Return the trajectories of a file, in its order; see :func:`load_records`."""
    return [record.trajectory for record in load_records(path)]


def load_records(path: Path) -> Iterator[Record]:
    """Yield the records of a file.

    Raises:
        DataError: the file cannot be read, or a line is not a trajectory; the message names file and line.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _record(line, f"{path}:{number}")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def find_records(place: Path) -> list[Record]:
    """Return the records of a file, of a folder of files, or of a run directory, in the order of the steps.

    Raises:
        DataError: there are none, or a file cannot be read.
    """
    folder = place / FOLDER if (place / FOLDER).is_dir() else place
    files = sorted(folder.glob("*.jsonl")) if folder.is_dir() else [folder]
    records = [record for file in files for record in load_records(file)]
    if not records:
        raise DataError(f"there are no trajectories in {place}; runs with agent.save_trajectories write them")
    return records


def _line(record: Record) -> str:
    return json.dumps(_as_json(record), ensure_ascii=False, separators=(",", ":"), default=_plain) + "\n"


def _as_json(record: Record) -> dict[str, Any]:
    trajectory, failure = record.trajectory, record.trajectory.failure
    texts: Sequence[str | None] = record.texts or [None] * len(trajectory.segments)
    return {
        "version": _VERSION,
        "group_id": trajectory.group_id,
        "rollout_id": trajectory.rollout_id,
        "end": trajectory.end,
        "reward": trajectory.reward,
        "turn_rewards": {str(turn): value for turn, value in trajectory.turn_rewards.items()},
        "reward_components": dict(trajectory.reward_components),
        "messages": list(trajectory.messages),
        "metrics": dict(trajectory.metrics),
        "failure": None if failure is None else {"boundary": failure.boundary, "message": failure.message},
        "extra": dict(trajectory.extra),
        "segments": [_segment_json(segment, text) for segment, text in zip(trajectory.segments, texts, strict=True)],
        "task": dict(record.task),
        "score": record.score,
    }


def _segment_json(segment: Segment, text: str | None) -> dict[str, Any]:
    return {
        "turn": segment.turn,
        "sampled": segment.sampled,
        "token_ids": _packed(segment.token_ids, _INTS),
        "log_probs": None if segment.log_probs is None else _packed(segment.log_probs, _FLOATS),
        "weight_versions": [list(run) for run in segment.weight_versions],
        "routed_experts": None if segment.routed_experts is None else _packed(segment.routed_experts, _SHORTS),
        "routed_shape": None if segment.routed_experts is None else list(segment.routed_experts.shape),
        "text": text,
    }


def _packed(values: Any, dtype: np.dtype[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype).tobytes()).decode("ascii")


def _unpacked(text: str, dtype: np.dtype[Any]) -> Any:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype).astype(dtype.newbyteorder("="))


def _plain(value: Any) -> Any:
    """Return a JSON value for a value that JSON does not support."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return dict(value) if isinstance(value, Mapping) else str(value)


def _record(line: str, place: str) -> Record:
    try:
        data = json.loads(line)
        if data["version"] != _VERSION:
            raise DataError(f"{place} has version {data['version']} of the format; this release reads {_VERSION}")
        segments = data["segments"]
        texts = [segment["text"] for segment in segments]
        failure = data["failure"]
        trajectory = Trajectory(
            segments=tuple(_segment(segment) for segment in segments),
            group_id=data["group_id"],
            rollout_id=data["rollout_id"],
            end=data["end"],
            reward=None if data["reward"] is None else float(data["reward"]),
            turn_rewards={int(turn): float(value) for turn, value in data["turn_rewards"].items()},
            reward_components={name: float(value) for name, value in data["reward_components"].items()},
            messages=data["messages"],
            metrics=data["metrics"],
            failure=None if failure is None else Failure(failure["boundary"], failure["message"]),
            extra=data["extra"],
        )
        return Record(trajectory, data["task"], data["score"], () if None in texts else texts)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{place} is not a saved trajectory: {type(error).__name__}: {error}") from error


def _segment(data: Mapping[str, Any]) -> Segment:
    log_probs, routed = data["log_probs"], data.get("routed_experts")
    return Segment(
        token_ids=_unpacked(data["token_ids"], _INTS),
        sampled=data["sampled"],
        turn=data["turn"],
        log_probs=None if log_probs is None else _unpacked(log_probs, _FLOATS),
        weight_versions=tuple(VersionRun(version, tokens) for version, tokens in data["weight_versions"]),
        routed_experts=None if routed is None else _unpacked(routed, _SHORTS).reshape(data["routed_shape"]),
    )
