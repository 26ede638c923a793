"""A session with scripted replies, for tests of loops without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rollcast.contracts.rollout import SamplingParams
from rollcast.errors import SessionEnded
from rollcast_agents.contracts.renderer import Message
from rollcast_agents.contracts.session import Reply, Session
from rollcast_agents.contracts.trajectory import End, Tokens, Trajectory
from rollcast_data.chat_template import ChatMessage, ToolCall, ToolSchema

__all__ = ["ScriptedSession"]


class ScriptedSession(Session):
    """A session that answers with the next scripted message; the last one is repeated.

    Args:
        replies: texts, or messages with tool calls.
        max_turns: number of replies before the session ends.

    Attributes:
        prompts: prompt of each call.
        followed: conversation that the loop let the session follow; None if it did not.
    """

    def __init__(self, replies: Sequence[str | Message], max_turns: int = 100) -> None:
        self._replies = [Message(reply) if isinstance(reply, str) else reply for reply in replies]
        self._max_turns = max_turns
        self._turns = 0
        self.prompts: list[Sequence[ChatMessage] | Tokens] = []
        self.followed: Sequence[ChatMessage] | None = None

    @staticmethod
    def call(name: str, text: str = "", **arguments: object) -> Message:
        """Return a reply with one tool call."""
        return Message(text, tool_calls=(ToolCall(name, arguments, "call_0"),))

    @property
    def session_id(self) -> str:
        return "scripted"

    @property
    def turns(self) -> int:
        return self._turns

    @property
    def end(self) -> End | None:
        return "max_turns" if self._turns >= self._max_turns else None

    async def sample(
        self,
        prompt: Sequence[ChatMessage] | Tokens,
        tools: Sequence[ToolSchema] = (),
        sampling: SamplingParams | None = None,
    ) -> Reply:
        if self.end is not None:
            raise SessionEnded("the script is over", self.end)
        self.prompts.append(list(prompt) if not isinstance(prompt, np.ndarray) else prompt)
        await asyncio.sleep(0)
        message = self._replies[min(self._turns, len(self._replies) - 1)]
        self._turns += 1
        ids = np.arange(3, dtype=np.int32)
        return Reply(message, ids, ids, np.zeros(3, np.float32), "stop", self.end)

    def follow(self, messages: Sequence[ChatMessage], metrics: Callable[[], Mapping[str, float]]) -> None:
        self.followed = messages

    def trajectories(self) -> list[Trajectory]:
        return []
