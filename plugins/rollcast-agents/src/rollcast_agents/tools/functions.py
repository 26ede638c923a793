"""Tools from Python functions: schema, checks and conversion by type hints and docstring."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

import docstring_parser
from pydantic import ConfigDict, TypeAdapter, ValidationError, validate_call
from pydantic.errors import PydanticUserError

from rollcast.errors import ConfigError
from rollcast_agents.contracts.tool import BaseTool, ToolResult
from rollcast_agents.threads import in_thread
from rollcast_data.chat_template import ToolSchema

__all__ = ["FunctionTool", "as_result", "describe", "public_methods"]


class FunctionTool(BaseTool):
    """A function or bound method as a tool; an ``async def`` runs on the event loop, a plain function in a thread.

    Raises:
        ConfigError: its arguments cannot be described to a model.
    """

    def __init__(self, function: Callable[..., Any], name: str = "") -> None:
        self._name = name or getattr(function, "__name__", type(function).__name__)
        self._schema = describe(function, self._name)
        # Models write numbers as text and text as numbers; both are converted.
        self._call = validate_call(config=ConfigDict(coerce_numbers_to_str=True))(function)
        self._is_async = inspect.iscoroutinefunction(function)

    @property
    def schema(self) -> ToolSchema:
        return self._schema

    async def call(self, state: Any, arguments: Mapping[str, Any]) -> ToolResult | str:
        try:
            value = self._call(**arguments) if self._is_async else await in_thread(self._call, **arguments)
            return as_result(await value if self._is_async else value)
        except ValidationError as error:
            if error.title != getattr(self._call, "__name__", error.title):
                raise  # an error of the function itself
            wrong = "; ".join(
                f"{'.'.join(map(str, problem['loc'])) or 'arguments'}: {problem['msg']}" for problem in error.errors()
            )
            return ToolResult(f"The arguments of {self._name} do not fit: {wrong}", is_error=True)


def as_result(value: Any) -> ToolResult:
    """Return a tool's return value as a result: text unchanged, other values as JSON if possible."""
    if isinstance(value, ToolResult):
        return value
    if value is None or isinstance(value, str):
        return ToolResult(value or "")
    try:
        return ToolResult(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError):
        return ToolResult(str(value))


def describe(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """Return a function's schema in OpenAI's format, with descriptions from its docstring.

    Raises:
        ConfigError: a parameter has a type that JSON cannot express.
    """
    doc = docstring_parser.parse(inspect.getdoc(function) or "")
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(function)  # type: ignore[arg-type]  # functions are taken too
        parameters = adapter.json_schema()
    except (PydanticUserError, TypeError, NameError) as error:
        raise ConfigError(f"tool {name}: its arguments cannot be described to a model: {error}") from error
    described = {param.arg_name: param.description for param in doc.params if param.description}
    for key, value in parameters.get("properties", {}).items():
        value.pop("title", None)
        if key in described:
            value["description"] = " ".join(described[key].split())
    parameters.pop("title", None)
    parameters.pop("additionalProperties", None)
    parameters.setdefault("properties", {})
    text = " ".join(filter(None, (doc.short_description, doc.long_description)))
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


def public_methods(owner: object, without: frozenset[str] = frozenset()) -> dict[str, Callable[..., Any]]:
    """Return the public methods of an object by name, in definition order."""
    names: dict[str, None] = {}
    for cls in reversed(type(owner).__mro__[:-1]):
        names |= dict.fromkeys(name for name, value in vars(cls).items() if inspect.isroutine(value))
    return {name: getattr(owner, name) for name in names if not name.startswith("_") and name not in without}
