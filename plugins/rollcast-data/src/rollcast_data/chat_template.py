"""Conversations in OpenAI's format, their rendering by a tokenizer's chat template, and what follows a reply."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollcast.errors import RendererError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ChatMessage", "ChatTemplate", "Closing", "ToolCall", "ToolSchema", "join_replies"]

logger = logging.getLogger(__name__)
_MARK = "rollcast-mark"


#: A message in OpenAI's chat format: ``role``, ``content``, optionally ``tool_calls``, ``tool_call_id``, ``name``.
ChatMessage = Mapping[str, Any]
#: A function in OpenAI's format: ``{"type": "function", "function": {"name", "description", "parameters"}}``.
ToolSchema = Mapping[str, Any]


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote.

    Attributes:
        name: name of the tool; empty if it could not be parsed.
        arguments: arguments by name; empty if they could not be parsed.
        call_id: id by which the tool's result refers to this call.
        error: description of a malformed call, as text for the model; empty for a well-formed call.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    call_id: str = ""
    error: str = ""


@dataclass(frozen=True)
class Closing:
    """The text that a template writes after the last reply of a conversation.

    Attributes:
        text: the whole text, such as ``<|im_end|>`` and a line break; empty if the template writes none.
        ending: its beginning up to its first special token, which is the model's to sample; empty if there is none.
        stop: the special token itself; empty if there is none.
    """

    text: str
    ending: str
    stop: str


class ChatTemplate:
    """A tokenizer's chat template.

    Args:
        tokenizer: tokenizer with a chat template.
        where: beginning of messages, such as the key that selects the template.

    Raises:
        RendererError: the tokenizer has no template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, where: str = "model.path") -> None:
        self._tokenizer: Any = tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise RendererError(
                f"{where}: the tokenizer in {tokenizer.name_or_path} has no chat template; choose a model with one"
            )
        self._closings: dict[str, Closing] = {}
        self._has_looked_for_tools = False

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text that a reply follows.

        A last message of the assistant is a prefill: its text stays open, and the reply continues it. After other
        messages the template opens the assistant's turn.

        Args:
            messages: conversation in OpenAI's chat format.
            tools: schemas of the tools; none if empty.
            options: further arguments of the template.

        Raises:
            RendererError: the template refuses the messages, or a prefill has tool calls or thinking and no text.
        """
        if not messages or messages[-1].get("role") != "assistant":
            return self.opened(messages, tools, options)
        prefill = messages[-1]
        if prefill.get("tool_calls"):
            raise RendererError(
                "the prompt ends with tool calls of the assistant, which cannot be continued; add the results of the "
                "tools, or leave the message out"
            )
        if prefill.get("content"):
            return self._render(messages, tools, options, continue_final_message=True)
        if prefill.get("reasoning_content") or prefill.get("reasoning"):
            raise RendererError(
                "the prompt ends with thinking of the assistant without a text, which cannot be continued; write the "
                "thinking into the message's content, as the template does"
            )
        return self.opened(messages[:-1], tools, options)

    def opened(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of messages and the opening of the assistant's next turn; see :meth:`prompt`."""
        return self._render(messages, tools, options, add_generation_prompt=True)

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of messages, of which the last is closed; see :meth:`prompt`."""
        return self._render(messages, tools, options)

    def unclosed(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> str | None:
        """Return the text of messages up to the end of the last one, a reply.

        Returns:
            None if the template closes this reply otherwise than :meth:`closing`.

        Raises:
            RendererError: see :meth:`text` and :meth:`closing`.
        """
        text, closing = self.text(messages, tools, options), self.closing(options).text
        return text.removesuffix(closing) if text.endswith(closing) else None

    def closing(self, options: Mapping[str, Any] | None = None) -> Closing:
        """Return what the template writes after a reply.

        Raises:
            RendererError: the template refuses a question with a reply, or does not write the reply's text.
        """
        key = json.dumps(dict(options or {}), sort_keys=True, default=repr)
        if key not in self._closings:
            self._closings[key] = self._find_closing(options)
        return self._closings[key]

    def _find_closing(self, options: Mapping[str, Any] | None) -> Closing:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
        before, mark, text = self.text(messages, (), options).rpartition(_MARK)
        if not mark:
            raise RendererError(
                f"the chat template of {self._tokenizer.name_or_path} does not write the content of a reply, here "
                f"{before + text!r}"
            )
        special = set(self._tokenizer.all_special_ids) | set(self._tokenizer.added_tokens_decoder)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        stop = next((str(self._tokenizer.convert_ids_to_tokens(token)) for token in ids if token in special), "")
        plain, marker, _ = text.partition(stop) if stop else ("", "", "")
        return Closing(text, plain + marker if marker else "", marker)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None,
        **how: bool,
    ) -> str:
        try:
            text = str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=list(tools) or None,
                    tokenize=False,
                    **{"add_generation_prompt": False, **how},
                    **dict(options or {}),
                )
            )
        except Exception as error:  # a template is a program and may raise anything
            raise RendererError(f"{type(error).__name__}: {error}") from error
        if tools and not self._has_looked_for_tools:
            self._has_looked_for_tools = True
            self._look_for_tools(text, tools)
        return text

    def _look_for_tools(self, text: str, tools: Sequence[Mapping[str, Any]]) -> None:
        """Warn if the template leaves the tools out, as one for a model without tools does without an error."""
        names = [str(tool.get("function", tool).get("name")) for tool in tools]
        if missing := [name for name in names if name not in text]:
            logger.warning(
                "the chat template of %s does not write the tools, so prompts tell the model nothing of %s",
                self._tokenizer.name_or_path,
                ", ".join(missing),
            )


def join_replies(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages with each prefill and its reply, two texts of the assistant in a row, joined into one."""
    joined: list[Mapping[str, Any]] = []
    for message in messages:
        before = joined[-1] if joined else {}
        roles = {before.get("role"), message.get("role")}
        texts = [part.get("content") or "" for part in (before, message)]
        if roles != {"assistant"} or before.get("tool_calls") or not all(isinstance(text, str) for text in texts):
            joined.append(message)
        else:
            joined[-1] = {**before, **message, "content": "".join(texts)}
    return joined
