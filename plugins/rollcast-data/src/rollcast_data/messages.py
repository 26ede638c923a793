"""Chat messages, tools and template options of a row, checked and in the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollcast.errors import DataError
from rollcast_data.files import Row
from rollcast_data.schemas import DataConfig

__all__ = ["COMPLETION", "ChatOptions", "describe", "read_chat_options", "read_messages", "read_tools"]

#: Column of what follows the prompt, as in TRL's datasets of prompt and completion.
COMPLETION = "completion"
#: Column of options that the chat template of one row gets.
_OPTIONS = "chat_template_kwargs"


class ChatOptions:
    """Tools and further keyword arguments of a row's chat template.

    Attributes:
        tools: schemas of the tools; empty if the row has none.
        kwargs: keyword arguments, those of the row before those of the config.
    """

    def __init__(self, tools: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> None:
        self.tools, self.kwargs = list(tools), dict(kwargs or {})


def read_messages(row: Row, value: Any, column: str) -> list[dict[str, Any]]:
    """Return a column's messages with their content as text.

    Keys that are null are left out, because all messages of a Parquet column have the same keys. Arguments of tool
    calls become mappings; they may be JSON text, as in OpenAI's format.

    Raises:
        DataError: it is no list of messages; names the row, the column and the message.
    """
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{row.location}: {column} has to be a list of messages with role and content, this is {describe(value)}"
        )
    return [_message(row, message, f"message {number} of {column}") for number, message in enumerate(value)]


def _message(row: Row, message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(f"{row.location}: {where} is {describe(message)}, not an object with role and content")
    fields = _without_nulls(message)
    calls = fields.pop("tool_calls", None) or []
    if not isinstance(fields.get("role"), str):
        hint = "; rename from to role and value to content" if "from" in fields and "value" in fields else ""
        raise DataError(
            f"{row.location}: {where} has no 'role' that is a string, its keys: {', '.join(fields) or 'none'}{hint}"
        )
    if fields["role"] == "assistant":
        fields.setdefault("content", "")  # a message of tool calls needs no text
    fields["content"] = _text(row, fields.get("content"), where)
    if calls:
        fields["tool_calls"] = [_call(row, call, where) for call in calls]
    return fields


def _text(row: Row, content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(
            f"{row.location}: {where} has no 'content' that is a string or a list of text parts, this is "
            f"{describe(content)}"
        )
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else describe(part)
            raise DataError(f"{row.location}: {where} has a part of type {kind!r}; only text can be trained on")
    return "".join(part["text"] for part in content)


def _call(row: Row, call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{row.location}: {where} has a tool call without function.name: {describe(call)}")
    arguments = _parsed(row, f"arguments of {where}", function.get("arguments") or {}, {})
    return {**_without_nulls(call), "function": {**_without_nulls(function), "arguments": arguments}}


def read_tools(row: Row, key: str) -> list[dict[str, Any]]:
    """Return the schemas in a row's column of tools: a list, or its JSON text; empty if there is no such column.

    Raises:
        DataError: it is something else, or a schema has no function with a name.
    """
    tools = _parsed(row, key, row.find(key) or [], [])
    if not isinstance(tools, list):
        raise DataError(
            f"{row.location}: {key} (data.tools_key) has to be a list of JSON schemas or its JSON text, this is "
            f"{describe(tools)}"
        )
    schemas = []
    for number, tool in enumerate(tools):
        schema = _parsed(row, f"schema {number} of {key}", tool, None) if isinstance(tool, str) else tool
        function = schema.get("function") if isinstance(schema, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(
                f"{row.location}: schema {number} of {key} (data.tools_key) is {describe(schema)}; it has to be "
                '{"type": "function", "function": {"name": …, "description": …, "parameters": …}}'
            )
        schemas.append(schema)
    return schemas


def read_chat_options(row: Row, config: DataConfig) -> ChatOptions:
    """Return the tools and template options of a row.

    Raises:
        DataError: a column is malformed.
    """
    own = _parsed(row, _OPTIONS, row.find(_OPTIONS) or {}, {})
    if not isinstance(own, Mapping):
        raise DataError(f"{row.location}: {_OPTIONS} has to be a mapping or its JSON text, this is {describe(own)}")
    kwargs = {**config.apply_chat_template_kwargs, **own}
    return ChatOptions(read_tools(row, config.tools_key), kwargs)


def describe(value: Any) -> str:
    """Return type and value, shortened, for messages."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _parsed(row: Row, what: str, value: Any, empty: Any) -> Any:
    """Return a value that may be given as JSON text; ``empty`` for null.

    Nulls in JSON are the data's own. Those of a Parquet file's structs mostly are not: all rows of a column have the
    same keys, and a key that a row lacks is null.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"{row.location}: {what}: not JSON: {error}") from error
    elif row.fills_structs:
        value = _deep_without_nulls(value)
    return empty if value is None else value


def _without_nulls(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if item is not None}


def _deep_without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _deep_without_nulls(item) for key, item in value.items() if item is not None}
    return [_deep_without_nulls(item) for item in value] if isinstance(value, list) else value
