"""Messages of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

__all__ = ["ApiMessage", "StrictModel", "plain_messages"]

_SHOWN = 80


def _content(value: Any) -> Any:
    """Return a message's content if it is text or a list of text parts."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("has to be a string or a list of parts")
    for part in value:
        if not isinstance(part, dict):
            raise ValueError("has a part that is not an object")
        kind = part.get("type")
        key = "refusal" if kind == "refusal" else "text"
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise ValueError(f"has a part of type {kind!r:.{_SHOWN}}; this endpoint supports text only")
        if not isinstance(part.get(key), str):
            raise ValueError(f"has a part without the string {key!r}")
    return value


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return valid messages with the text of each content in place of its parts, as chat templates expect it."""
    return [{**message, "content": _text_of(message.get("content"))} for message in messages]


def _text_of(content: str | Sequence[Mapping[str, str]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part["refusal" if part["type"] == "refusal" else "text"] for part in content)


class StrictModel(BaseModel):
    """Base class of objects that have no further keys, and whose values are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _CalledFunction(StrictModel):
    name: str
    arguments: str


class _Call(BaseModel):
    """A call of an earlier reply. Clients add keys, such as the ``index`` of a stream's pieces."""

    model_config = ConfigDict(extra="allow", strict=True)

    id: str
    type: Literal["function"]
    function: _CalledFunction


class ApiMessage(BaseModel):
    """A message. The chat template reads it with its further keys, such as ``reasoning_content``."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, BeforeValidator(_content)] = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _check_role(self) -> ApiMessage:
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("has the role 'tool' and needs a tool_call_id")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"has tool_calls; only a message of the role 'assistant' can have them, not {self.role!r}")
        if self.content is None and not self.tool_calls and self.refusal is None:
            raise ValueError("needs content")
        return self
