"""Contract of renderers, which convert messages to token ids and sampled ids back to a message.

A conversation grows with :meth:`BaseRenderer.extend`, which keeps the existing ids. If a renderer cannot prove that
the template would keep them, ``extend`` returns None and the session forks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollcast.plugins import Registry, subclass_of
from rollcast_data.chat_template import ChatMessage, ToolCall, ToolSchema

if TYPE_CHECKING:
    from rollcast_agents.contracts.trajectory import Tokens

__all__ = ["BaseRenderer", "Message", "RendererSetup", "renderers"]


@dataclass(frozen=True)
class Message:
    """A reply of the model.

    Attributes:
        text: content without reasoning and tool calls.
        reasoning: the model's thinking; empty if there is none.
        tool_calls: tool calls in the order in which the model wrote them.
    """

    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class RendererSetup:
    """Constructor arguments of a renderer.

    Attributes:
        model_path: Hugging Face folder of the model and tokenizer.
        tool_format: name of the format in which the model writes tool calls; empty for the renderer's default.
        options: further options, from ``agent.renderer_kwargs``.
        trust_remote_code: allow the folder's own Python code.
    """

    model_path: str
    tool_format: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False


class BaseRenderer(ABC):
    """Base class of renderers, which convert conversations to token ids for one model. Must be thread-safe."""

    def __init__(self, setup: RendererSetup) -> None:
        self.setup = setup

    @abstractmethod
    def start(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()) -> Tokens:
        """Return the ids of a conversation up to the start of the model's reply, int32 ``[tokens]``.

        Raises:
            RendererError: the template refuses the messages.
        """

    @abstractmethod
    def extend(self, ids: Tokens, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()) -> Tokens | None:
        """Append ``messages`` to ``ids``, up to the start of the next reply; None if ``ids`` would change.

        Args:
            ids: exact ids of the context, which end with the model's last reply as sampled.
            messages: the whole conversation: the messages already in ``ids``, then the new ones.
            tools: tools of the conversation.

        Raises:
            RendererError: the template refuses the messages.
        """

    @abstractmethod
    def parse(self, ids: Tokens, tools: Sequence[ToolSchema] = ()) -> Message:
        """Parse sampled ids into a reply; a malformed tool call has an ``error``.

        Args:
            ids: sampled tokens.
            tools: tools that the prompt offered, whose names and types decide what is a call where a format is
                ambiguous.
        """

    @abstractmethod
    def encode(self, text: str) -> Tokens:
        """Encode plain text without a template, int32 ``[tokens]``."""

    @abstractmethod
    def decode(self, ids: Tokens) -> str:
        """Decode ids to text, including special tokens."""

    @property
    @abstractmethod
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a reply."""


renderers: Registry[type[BaseRenderer]] = Registry(
    "rollcast.renderers",
    subclass_of(BaseRenderer),
    "agent.renderer",
    description="conversion of conversations to token ids and back",
)
