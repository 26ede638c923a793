"""Assembling trajectories into a batch: the only place where recorded tokens become columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollcast.contracts.rollout import ROUTED_EXPERTS
from rollcast.protocol import DataProto, Jagged
from rollcast_agents.contracts.trajectory import Segment, Trajectory
from rollcast_serving.generation import joined_routes

__all__ = ["assemble_trajectories"]


def assemble_trajectories(trajectories: Sequence[Trajectory]) -> DataProto:
    """Return a batch with one row per trajectory.

    Args:
        trajectories: in row order; those of one rollout need not be adjacent.

    Returns:
        Jagged columns: ``prompts`` int32, the tokens before the first sampled one; and for the remaining tokens
            ``responses`` int32, ``response_mask`` bool (True if the policy chose the token, so it is trained),
            ``rollout_log_probs`` float32 (0 where the policy did not choose), ``turn_ids`` int32, and
            ``environment_scores`` float32: the reward of a turn at the last token of its reply; the rest of the
            rollout's reward at its last sampled token, on the row that sampled it. Columns ``[B]``: ``finished`` bool
            (``end`` is ``done``), ``rollout_weight_version`` and ``rollout_weight_version_min`` int64 (-1 if nothing
            was sampled), ``rollout_index`` int64 (equal for rows of one rollout), ``is_final`` bool (True for the row
            with the rollout's last reply), ``is_scored`` bool (True if the environment or loop scored the rollout, so
            that no reward function is needed), and the objects ``group_id``, ``rollout_id``, ``end``. If the engine
            recorded them, jagged over prompt and response ``routed_experts`` int16.
    """
    rows = [_Row(trajectory) for trajectory in trajectories]
    final = _final(rows)
    responses = _jagged([row.responses for row in rows], np.int32)
    columns: dict[str, Any] = {
        "prompts": _jagged([row.prompts for row in rows], np.int32).column(),
        "responses": responses.column(),
        "response_mask": responses.like(_flat([row.sampled for row in rows], np.bool_)),
        "rollout_log_probs": responses.like(_flat([row.log_probs for row in rows], np.float32)),
        "turn_ids": responses.like(_flat([row.turns for row in rows], np.int32)),
        "environment_scores": responses.like(_flat(_scores(rows, final), np.float32)),
    }
    routed = joined_routes([row.routed for row in rows], [len(row.prompts) + len(row.responses) for row in rows])
    if routed is not None:
        columns[ROUTED_EXPERTS] = routed.column()
    versions = [[run.version for segment in row.behind for run in segment.weight_versions] for row in rows]
    index: dict[str, int] = {}
    columns |= {
        "finished": torch.tensor([trajectory.end == "done" for trajectory in trajectories], dtype=torch.bool),
        "rollout_weight_version": torch.tensor(
            [version[-1] if version else -1 for version in versions], dtype=torch.int64
        ),
        "rollout_weight_version_min": torch.tensor(
            [min(version, default=-1) for version in versions], dtype=torch.int64
        ),
        "rollout_index": torch.tensor(
            [index.setdefault(trajectory.rollout_id, len(index)) for trajectory in trajectories], dtype=torch.int64
        ),
        "is_final": torch.from_numpy(final),
        "is_scored": torch.tensor([row.is_scored for row in rows], dtype=torch.bool),
    }
    objects = {
        name: _objects([getattr(trajectory, name) for trajectory in trajectories])
        for name in ("group_id", "rollout_id", "end")
    }
    return DataProto.from_dict(columns, objects)


class _Row:
    """A trajectory split into prompt and response, as arrays."""

    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory = trajectory
        first = next((i for i, segment in enumerate(trajectory.segments) if segment.sampled), len(trajectory.segments))
        self.behind: tuple[Segment, ...] = trajectory.segments[first:]
        self.prompts = _joined([segment.token_ids for segment in trajectory.segments[:first]], np.int32)
        self.responses = _joined([segment.token_ids for segment in self.behind], np.int32)
        self.sampled = _spread(self.behind, [segment.sampled for segment in self.behind], np.bool_)
        self.turns = _spread(self.behind, [segment.turn for segment in self.behind], np.int32)
        zeros = [
            np.zeros(len(segment), np.float32) if segment.log_probs is None else segment.log_probs
            for segment in self.behind
        ]
        self.log_probs = _joined(zeros, np.float32)
        self.is_scored = trajectory.reward is not None
        self.routed = _routes(trajectory.segments)

    @property
    def last_turn(self) -> int:
        """Last turn that was sampled in this trajectory; -1 for none."""
        return max((segment.turn for segment in self.behind if segment.sampled), default=-1)

    def place_of(self, turn: int) -> int:
        """Return the index of the turn's last sampled token; -1 if another trajectory sampled it."""
        places = np.flatnonzero(self.sampled & (self.turns == turn))
        return int(places[-1]) if len(places) else -1


def _routes(segments: Sequence[Segment]) -> NDArray[np.int16] | None:
    """Return the experts of all tokens, -1 where none were recorded; None if that is everywhere."""
    shape = next((segment.routed_experts.shape[1:] for segment in segments if segment.routed_experts is not None), None)
    if shape is None:
        return None
    parts = [
        np.full((len(segment), *shape), -1, np.int16) if segment.routed_experts is None else segment.routed_experts
        for segment in segments
    ]
    return np.concatenate(parts)


def _final(rows: Sequence[_Row]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return a mask of the rows with the last reply of their rollout; without replies, the rollout's first row."""
    last: dict[str, int] = {}
    for number, row in enumerate(rows):
        name = row.trajectory.rollout_id
        if name not in last or row.last_turn > rows[last[name]].last_turn:
            last[name] = number
    final = np.zeros(len(rows), np.bool_)
    final[list(last.values())] = True
    return final


def _scores(
    rows: Sequence[_Row], final: np.ndarray[Any, np.dtype[np.bool_]]
) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    """Return each row's rewards by token; a rollout's overall reward is on the row with its last reply."""
    scores = [np.zeros(len(row.responses), np.float32) for row in rows]
    for number, (row, score) in enumerate(zip(rows, scores, strict=True)):
        rewards = row.trajectory.turn_rewards
        for turn, reward in rewards.items():
            if (place := row.place_of(turn)) >= 0:
                score[place] += reward
        whole = row.trajectory.reward
        if whole is not None and final[number] and row.last_turn >= 0:
            score[row.place_of(row.last_turn)] += whole - sum(rewards.values())
    return scores


def _spread(segments: Sequence[Segment], values: Sequence[Any], dtype: Any) -> Any:
    return np.repeat(np.asarray(values, dtype), [len(segment) for segment in segments])


def _joined(parts: Sequence[Any], dtype: Any) -> Any:
    return np.concatenate([np.empty(0, dtype), *(np.asarray(part, dtype) for part in parts)])


def _flat(parts: Sequence[Any], dtype: Any) -> torch.Tensor:
    return torch.from_numpy(_joined(parts, dtype))


def _jagged(parts: Sequence[Any], dtype: Any) -> Jagged:
    return Jagged.from_lengths(_flat(parts, dtype), torch.tensor([len(part) for part in parts], dtype=torch.int64))


def _objects(values: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.object_]]:
    return np.fromiter(values, dtype=object, count=len(values))
