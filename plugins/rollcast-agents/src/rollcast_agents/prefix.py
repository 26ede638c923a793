"""Proof that a renderer extends conversations without changing what is there: for the suite and for the doctor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rollcast_agents.chat import as_chat
from rollcast_agents.contracts.renderer import BaseRenderer
from rollcast_agents.contracts.trajectory import Tokens
from rollcast_data.chat_template import ChatMessage, ToolSchema

__all__ = ["CONVERSATIONS", "REPLIES", "Conversation", "Extension", "TOOL", "extend_each", "sampled"]

Conversation = tuple[list[ChatMessage], list[ChatMessage], Sequence[ToolSchema]]
"""A prompt, the messages behind the first reply, and tools."""

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
_PROMPT: list[ChatMessage] = [{"role": "user", "content": "2+2?"}]
_SYSTEM: list[ChatMessage] = [{"role": "system", "content": "Be brief."}, *_PROMPT]
_USER: ChatMessage = {"role": "user", "content": "Are you sure?"}
_RESULT: ChatMessage = {"role": "tool", "content": "4", "name": "add", "tool_call_id": "call_0"}

CONVERSATIONS: tuple[Conversation, ...] = (
    (_PROMPT, [_USER], ()),
    (_SYSTEM, [_USER], ()),
    (_PROMPT, [_RESULT], (TOOL,)),
    (_PROMPT, [_RESULT, _USER], (TOOL,)),
)
#: Texts that a model may sample: plain, empty, with odd blanks, with a broken call of a tool.
REPLIES = ("four", "", " two  spaces\n", "<tool_call>{")


class Extension(NamedTuple):
    """A context and its extension.

    Attributes:
        reply: text that was sampled.
        roles: roles of the messages behind it.
        ids: context with the reply, int32 ``[tokens]``.
        extended: the ids with the messages behind it; None if the renderer cannot prove that it keeps ``ids``.
    """

    reply: str
    roles: tuple[str, ...]
    ids: Tokens
    extended: Tokens | None

    @property
    def keeps(self) -> bool:
        """True if the extension begins with the exact ids of the context, and adds some."""
        more, before = self.extended, self.ids
        return more is not None and len(more) > len(before) and np.array_equal(more[: len(before)], before)


def sampled(renderer: BaseRenderer, text: str) -> Tokens:
    """Return the ids of a reply as a model samples them: with a stop token at their end."""
    return np.append(renderer.encode(text), renderer.stop_token_ids[0]).astype(np.int32)


def extend_each(
    renderer: BaseRenderer, conversations: Iterable[Conversation] = CONVERSATIONS, replies: Sequence[str] = REPLIES
) -> Iterator[Extension]:
    """Yield the extension of each conversation behind each reply.

    Raises:
        RendererError: the template refuses a conversation.
    """
    for prompt, more, tools in conversations:
        for text in replies:
            said = sampled(renderer, text)
            ids = np.concatenate([renderer.start(prompt, tools), said])
            messages = [*prompt, as_chat(renderer.parse(said, tools)), *more]
            roles = tuple(str(message.get("role")) for message in more)
            yield Extension(text, roles, ids, renderer.extend(ids, messages, tools))
