"""Contract of renderers: messages to token ids, and sampled ids back to a message.

A conversation grows by :meth:`BaseRenderer.extend`, which keeps the ids that are there. Where a renderer cannot prove
that the template would keep them, it returns None, and the session forks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollcast.plugins import Registry, subclass_of

if TYPE_CHECKING:
    from rollcast.contracts.trajectory import Tokens

__all__ = ["BaseRenderer", "ChatMessage", "Message", "RendererSetup", "ToolCall", "ToolSchema", "renderers"]

#: A message in OpenAI's chat format: ``role``, ``content``, perhaps ``tool_calls``, ``tool_call_id``, ``name``.
ChatMessage = Mapping[str, Any]
#: A function in OpenAI's format: ``{"type": "function", "function": {"name", "description", "parameters"}}``.
ToolSchema = Mapping[str, Any]


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote.

    Attributes:
        name: of the tool; empty if it could not be read.
        arguments: by name; empty if they could not be read.
        call_id: id that the result refers to.
        error: what is wrong with the call, as text for the model; empty for a well-formed one.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    call_id: str = ""
    error: str = ""


@dataclass(frozen=True)
class Message:
    """A reply of the model.

    Attributes:
        text: content without reasoning and tool calls.
        reasoning: thinking, empty if there is none.
        tool_calls: in the order that the model wrote them.
    """

    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class RendererSetup:
    """Arguments that a renderer is built from.

    Attributes:
        model_path: Hugging Face folder of the model and tokenizer.
        tool_format: name of the format in which the model writes tool calls; empty for the renderer's own.
        options: further options, the config's ``agent.renderer_kwargs``.
    """

    model_path: str
    tool_format: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


class BaseRenderer(ABC):
    """Turns conversations into token ids for one model; called from several threads."""

    def __init__(self, setup: RendererSetup) -> None:
        self.setup = setup

    @abstractmethod
    def start(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()) -> Tokens:
        """Return the ids of a conversation, up to where the model's reply begins; int32 ``[tokens]``.

        Raises:
            RendererError: the template refuses the messages.
        """

    @abstractmethod
    def extend(self, ids: Tokens, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()) -> Tokens | None:
        """Return ``ids`` and what follows them, up to where the next reply begins; None if ``ids`` would change.

        Args:
            ids: exact ids of the context, which end with the model's last reply as it was sampled.
            messages: whole conversation: what ``ids`` hold, up to that reply, then the new messages.
            tools: tools of the conversation.

        Raises:
            RendererError: the template refuses the messages.
        """

    @abstractmethod
    def parse(self, ids: Tokens) -> Message:
        """Return the reply that the sampled ids stand for; a malformed tool call has an ``error``."""

    @abstractmethod
    def encode(self, text: str) -> Tokens:
        """Return the ids of plain text, without any template; int32 ``[tokens]``."""

    @abstractmethod
    def decode(self, ids: Tokens) -> str:
        """Return the text of ids, special tokens included."""

    @property
    @abstractmethod
    def stop_token_ids(self) -> tuple[int, ...]:
        """The ids that end a reply."""


renderers: Registry[type[BaseRenderer]] = Registry(
    "rollcast.renderers",
    subclass_of(BaseRenderer),
    "agent.renderer",
    description="conversion of conversations to token ids and back",
)
