"""Messages in OpenAI's chat format: conversion, comparison, checks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollcast.errors import RendererError
from rollcast_agents.contracts.renderer import Message
from rollcast_data.chat_template import ChatMessage, ToolCall

__all__ = ["as_chat", "for_template", "key_of", "text_of", "tool_message"]

_ROLES = ("system", "developer", "user", "assistant", "tool")


def as_chat(message: Message) -> dict[str, Any]:
    """Return a reply as an assistant message; malformed tool calls stay part of its text."""
    chat: dict[str, Any] = {"role": "assistant", "content": message.text}
    if message.reasoning:
        chat["reasoning_content"] = message.reasoning
    if calls := [_call_of(call) for call in message.tool_calls if not call.error]:
        chat["tool_calls"] = calls
    return chat


def _call_of(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"id": call.call_id, "type": "function", "function": function}


def tool_message(call: ToolCall, text: str) -> dict[str, Any]:
    """Return the message that answers a tool call."""
    message: dict[str, Any] = {"role": "tool", "content": text}
    return (
        message | ({"name": call.name} if call.name else {}) | ({"tool_call_id": call.call_id} if call.call_id else {})
    )


def text_of(content: Any) -> str:
    """Return the text of a message's content: a string, None, or a list of parts.

    Raises:
        RendererError: a part is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise RendererError(f"a message's content is a {type(content).__name__}; it must be text or a list of parts")
    parts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text", "output_text", "refusal"):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RendererError(f"a message has a part of type {kind!r}; only text can be rendered")
        parts.append(str(part.get("text", part.get("refusal", ""))))
    return "".join(parts)


def for_template(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages as chat templates expect them: content as text, arguments of tool calls as mappings.

    Raises:
        RendererError: a message has no known role, or content that is not text; the message names its position.
    """
    return [_for_template(position, message) for position, message in enumerate(messages)]


def _for_template(position: int, message: ChatMessage) -> dict[str, Any]:
    if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
        role = message.get("role") if isinstance(message, Mapping) else type(message).__name__
        raise RendererError(f"message {position} has the role {role!r}; valid: {', '.join(_ROLES)}")
    try:
        plain = {**message, "content": text_of(message.get("content"))}
    except RendererError as error:
        raise RendererError(f"message {position}: {error}") from None
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [{**call, "function": _function(call)} for call in calls]
    else:
        plain.pop("tool_calls", None)
    return plain


def _function(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
            json.dumps(parsed, ensure_ascii=False).encode()  # a lone surrogate cannot be tokenized
        except (ValueError, RecursionError):
            return function
        function["arguments"] = parsed if isinstance(parsed, dict) else arguments
    return function


def key_of(message: ChatMessage) -> tuple[Any, ...]:
    """Return a value that is equal for messages with the same meaning, however a client serializes them.

    Reasoning and call ids are excluded, since clients drop reasoning and rename ids.
    """
    calls = tuple(
        (function.get("name"), json.dumps(function.get("arguments"), sort_keys=True, default=str))
        for function in (_function(call) for call in message.get("tool_calls") or ())
    )
    return message.get("role"), text_of(message.get("content")), calls
