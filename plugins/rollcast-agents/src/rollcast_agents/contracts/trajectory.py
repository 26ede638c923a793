"""Contract of trajectories, the token-by-token records of an engine's sampling.

Training data is derived only from these records. A token is under the loss only if its segment records that the
engine sampled it; text is never tokenized again::

    trajectory.token_ids      # int32 [tokens]: prompt, replies, tool results, in the order of the context
    trajectory.sampled_mask   # bool [tokens]: True where the policy chose the token
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ENDS",
    "Boundary",
    "End",
    "Failure",
    "Floats",
    "Segment",
    "Tokens",
    "Trajectory",
    "VersionRun",
]

Tokens = NDArray[np.int32]
Floats = NDArray[np.float32]
#: Reason why a trajectory ended.
End = Literal["done", "max_turns", "length", "timeout", "aborted", "error"]
ENDS: tuple[End, ...] = ("done", "max_turns", "length", "timeout", "aborted", "error")
#: Part of a rollout in which a failure occurred.
Boundary = Literal["engine", "renderer", "environment", "tool", "program", "reward", "loop"]


class VersionRun(NamedTuple):
    """Consecutive tokens sampled with one version of the weights."""

    version: int
    tokens: int


@dataclass(frozen=True)
class Failure:
    """The failure of one rollout.

    Attributes:
        boundary: part that failed.
        message: one-line error message for the user.
    """

    boundary: Boundary
    message: str


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive tokens of one origin.

    Attributes:
        token_ids: ids of the tokens, int32 ``[tokens]``.
        sampled: True if the engine sampled the tokens; False if they are given, that is part of its input.
        turn: index, from 0, of the reply that sampled tokens belong to or that given tokens precede.
        log_probs: log-probs as the engine returned them, float32 ``[tokens]``; None for given tokens.
        weight_versions: versions of the weights that sampled the tokens, in order; empty for given tokens.
        routed_experts: experts that the engine's routers chose, int16 ``[tokens, layers with experts, experts of a
            token]``, -1 for a token that the engine had not read yet; None if they were not recorded.
    """

    token_ids: Tokens
    sampled: bool
    turn: int
    log_probs: Floats | None = None
    weight_versions: tuple[VersionRun, ...] = ()
    routed_experts: NDArray[np.int16] | None = None

    def __post_init__(self) -> None:
        if self.routed_experts is not None and len(self.routed_experts) != len(self.token_ids):
            raise ValueError(
                f"a segment of {len(self.token_ids)} tokens has routed experts of {len(self.routed_experts)}"
            )
        if not self.sampled and (self.log_probs is not None or self.weight_versions):
            raise ValueError("a given segment has no log-probs and no weight versions")
        if not self.sampled:
            return
        if self.log_probs is None or len(self.log_probs) != len(self.token_ids):
            count = "none" if self.log_probs is None else len(self.log_probs)
            raise ValueError(f"a sampled segment of {len(self.token_ids)} tokens needs as many log-probs, got {count}")
        if (total := sum(run.tokens for run in self.weight_versions)) != len(self.token_ids):
            raise ValueError(f"the weight versions cover {total} of {len(self.token_ids)} sampled tokens")

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One path through the context of a rollout, from its first prompt to its last token.

    A rollout whose context was rewritten has several trajectories with one ``rollout_id``; a loss counts them as one
    rollout. No token is marked as sampled in two of them.

    Attributes:
        segments: segments in the order of the context; the first one is given.
        group_id: id of the prompt that the rollout belongs to; rollouts of one group are compared.
        rollout_id: id of the rollout that the trajectory belongs to.
        end: reason why the trajectory ended.
        reward: score of the whole rollout, including its turns; None if not scored.
        turn_rewards: turn → reward for this turn's reply.
        reward_components: named parts of the reward, for metrics.
        messages: conversation in OpenAI's chat format, for rewards and reports.
        metrics: metrics of the rollout, such as ``turns`` and ``tool_calls``.
        failure: failure of the rollout; None unless ``end`` is ``error`` or ``timeout``, or a reward or metric of the
            rollout was not a finite number (boundary ``reward``), which makes the rollout a bad sample.
        extra: further data for the reward function, such as the environment's final state.
    """

    segments: tuple[Segment, ...]
    group_id: str
    rollout_id: str
    end: End
    reward: float | None = None
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    reward_components: Mapping[str, float] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def token_ids(self) -> Tokens:
        """Ids of all tokens, int32 ``[tokens]``."""
        return np.concatenate([segment.token_ids for segment in self.segments] or [np.empty(0, np.int32)])

    @cached_property
    def sampled_mask(self) -> NDArray[np.bool_]:
        """True for tokens that the engine sampled, bool ``[tokens]``."""
        return np.repeat([segment.sampled for segment in self.segments], [len(segment) for segment in self.segments])

    @property
    def prompt_length(self) -> int:
        """Number of given tokens before the first sampled one."""
        length = 0
        for segment in self.segments:
            if segment.sampled:
                break
            length += len(segment)
        return length

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the engine sampled."""
        return sum(len(segment) for segment in self.segments if segment.sampled)
