"""Tools of OpenAI's API, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from pydantic import Field
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from rollcast_data.chat_template import ToolCall
from rollcast_serving.openai_bodies import children
from rollcast_serving.openai_errors import ApiError
from rollcast_serving.openai_messages import StrictModel

__all__ = ["ApiTool", "Tools", "read_tools"]


class _Function(StrictModel):
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ApiTool(StrictModel):
    """A function that a request offers."""

    type: Literal["function"]
    function: _Function


@dataclass(frozen=True)
class Tools:
    """Tools of a chat request.

    Attributes:
        shown: tools that the model sees, in the API's format.
        callable: names of the tools that it may call; None for any name.
        strict: validators of the arguments of strict functions, by name.
    """

    shown: list[dict[str, Any]]
    callable: frozenset[str] | None = None
    strict: Mapping[str, Draft202012Validator] = field(default_factory=dict)

    def allow(self, call: ToolCall) -> bool:
        """True if the call may be returned; the arguments of a strict function have to fit its schema."""
        if self.callable is not None and call.name not in self.callable:
            return False
        schema = self.strict.get(call.name)
        try:
            return schema is None or bool(schema.is_valid(dict(call.arguments)))
        except RecursionError:
            return False  # a schema that refers to itself alone fits nothing


def read_tools(choice: Any, tools: list[dict[str, Any]]) -> Tools:
    """Return the tools that the model sees, and those that it may call.

    Args:
        choice: ``tool_choice`` of the request.
        tools: the request's tools, as sent.

    Raises:
        ApiError: ``tool_choice`` forces a call, which would need constrained sampling, or is malformed.
    """
    if choice == "none" or (not tools and choice in (None, "auto")):
        return Tools(tools, frozenset())
    strict = _strict_schemas(tools)
    if choice in (None, "auto"):
        return Tools(tools, strict=strict)
    kind = choice.get("type") if isinstance(choice, dict) else choice
    allowed = choice.get("allowed_tools") if kind == "allowed_tools" else None
    mode = allowed.get("mode") if isinstance(allowed, dict) else kind
    if "required" in (kind, mode) or kind in ("function", "custom"):
        raise ApiError(
            f"tool_choice {kind!r} is not supported: nothing forces the model to call a tool; use 'auto'",
            "tool_choice",
            "unsupported_value",
        )
    names = _allowed_names(allowed)
    shown = [tool for tool in tools if tool["function"]["name"] in names]
    if not names or len(shown) < len(names):
        raise ApiError(
            "tool_choice has to be 'none', 'auto', or an object of type 'allowed_tools' with the mode 'auto' and "
            "names of the request's tools",
            "tool_choice",
        )
    return Tools(shown, frozenset(names), strict)


def _strict_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Draft202012Validator]:
    """Return validators of the arguments of strict functions, by name.

    Raises:
        ApiError: parameters are not a JSON schema, or refer to something outside it.
    """
    schemas = {}
    for place, function in enumerate(tool["function"] for tool in tools):
        if not function.get("strict"):
            continue
        schema = function.get("parameters") or {}
        resolver = Registry().with_resource("", DRAFT202012.create_resource(schema)).resolver()
        try:
            Draft202012Validator.check_schema(schema)
            for reference in _references(schema):
                resolver.lookup(reference)
        except (SchemaError, Unresolvable) as error:
            param = f"tools[{place}].function.parameters"
            reason = error.message if isinstance(error, SchemaError) else f"there is no {error.ref!r}"
            raise ApiError(f"{param}: {reason}", param, "invalid_function_parameters") from error
        # An empty registry, so that nothing is fetched.
        schemas[function["name"]] = Draft202012Validator(schema, registry=Registry())
    return schemas


def _references(schema: Any) -> Iterator[str]:
    """Yield the references of a schema."""
    for key, value in schema.items() if isinstance(schema, dict) else ():
        if key in ("$ref", "$dynamicRef") and isinstance(value, str):
            yield value
    for inner in children(schema):
        yield from _references(inner)


def _allowed_names(allowed: Any) -> set[str]:
    """Return the names of an ``allowed_tools`` object; empty if it is malformed."""
    tools = allowed.get("tools") if isinstance(allowed, dict) and allowed.get("mode") == "auto" else None
    names: set[str] = set()
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            return set()
        names.add(name)
    return names
