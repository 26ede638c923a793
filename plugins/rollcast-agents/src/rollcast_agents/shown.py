"""Replies as clients see them: text without stop strings, and the calls that a request allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollcast.contracts.rollout import SamplingParams
from rollcast_agents.contracts.renderer import BaseRenderer, Message
from rollcast_agents.contracts.trajectory import Tokens
from rollcast_agents.renderers.chat_template import split_reasoning
from rollcast_data.chat_template import ToolCall
from rollcast_serving.openai_format import cut_stop_token, cut_text

__all__ = ["Shown", "decode", "read_reply"]


@dataclass(frozen=True)
class Shown:
    """A reply as text and as the renderer parsed it.

    Attributes:
        parsed: message that the renderer parsed; its text may contain a stop string.
        raw: text of the sampled ids without the stop token.
        text: ``raw`` before the stop string.
    """

    parsed: Message
    raw: str
    text: str

    def message(self, allow: Callable[[ToolCall], bool]) -> Message:
        """Return the message that a client gets.

        Args:
            allow: True for a call that the request allows. A reply with another call is plain text.
        """
        calls = [call for call in self.parsed.tool_calls if not call.error]
        if calls and not all(map(allow, calls)):
            reasoning, text = split_reasoning(self.text) if self.parsed.reasoning else ("", self.text)
            return Message(text, reasoning)
        if self.raw.strip() == self.parsed.text.strip():
            return replace(self.parsed, text=self.text)
        return replace(self.parsed, text=self.parsed.text.removesuffix(self.raw[len(self.text) :].rstrip()))

    def forms(self) -> list[Message]:
        """Return the messages with which a client or a loop may repeat the reply."""
        return [self.parsed, self.message(lambda _: True), self.message(lambda _: False)]


def read_reply(
    renderer: BaseRenderer, parsed: Message, ids: Tokens, finish_reason: str, sampling: SamplingParams
) -> Shown:
    """Return a reply in the forms in which it can be shown.

    Args:
        renderer: renderer of the model.
        parsed: message that the renderer parsed.
        ids: sampled ids, int32 ``[tokens]``.
        finish_reason: that of the sampled sequence.
        sampling: sampling parameters of the reply.
    """
    stops = (*sampling.stop_token_ids, *renderer.stop_token_ids)
    raw = decode(renderer, cut_stop_token(ids, finish_reason, stops))
    return Shown(parsed, raw, cut_text(raw, sampling.stop))


def decode(renderer: BaseRenderer, ids: Sequence[int] | Tokens) -> str:
    """Return the text of token ids."""
    return renderer.decode(np.asarray(ids, np.int32))
