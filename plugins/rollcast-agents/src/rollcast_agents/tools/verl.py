"""verl's tools: classes derived from its ``BaseTool``, and the YAML files that list them (``tool_config_path``)."""

from __future__ import annotations

import importlib
import inspect
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollcast.errors import ConfigError
from rollcast_agents.contracts.tool import BaseTool, ToolResult
from rollcast_agents.verl_files import awaited, import_class, read_entries
from rollcast_data.chat_template import ToolSchema

__all__ = ["VerlTool", "load_tool_config"]


class VerlTool(BaseTool):
    """A tool written for verl, with ``create``, ``execute``, ``calc_reward`` and ``release``, each ``async``.

    The tool is created once per rollout instead of once per call, so its state lives as long as the trajectory.

    Args:
        inner: object of verl's class.
        schema: schema of the tool in OpenAI's format.
    """

    def __init__(self, inner: Any, schema: Mapping[str, Any]) -> None:
        self._inner = inner
        self._schema = dict(schema)

    @property
    def schema(self) -> ToolSchema:
        return self._schema

    async def open(self, task: Mapping[str, Any]) -> str:
        instance = str(uuid.uuid4())
        name = self._schema["function"]["name"]
        options = ((task.get("extra_info") or {}).get("tools_kwargs") or task.get("tools_kwargs") or {}).get(name, {})
        created = await awaited(self._inner.create(instance, **(options.get("create_kwargs") or {})))
        return str(created[0] if isinstance(created, tuple) else created or instance)

    async def call(self, state: Any, arguments: Mapping[str, Any]) -> ToolResult:
        answer = await awaited(self._inner.execute(state, dict(arguments)))
        text, reward, metrics = (*answer, None, None)[:3] if isinstance(answer, tuple) else (answer, None, None)
        numbers = {key: float(value) for key, value in (metrics or {}).items() if isinstance(value, int | float)}
        return ToolResult(str(getattr(text, "text", text) or ""), 0.0 if reward is None else reward, numbers)

    async def release(self, state: Any) -> None:
        await awaited(self._inner.release(state))


def load_tool_config(path: str | Path) -> list[BaseTool]:
    """Return the tools of verl's YAML file: a list ``tools`` of ``class_name``, ``config`` and ``tool_schema``.

    Raises:
        ConfigError: the file or a class cannot be read; the message names the entry.
    """
    entries = read_entries("agent.tool_config_path", path, "tools")
    return [_tool(where, entry) for where, entry in entries.items()]


def _tool(where: str, entry: Mapping[str, Any]) -> BaseTool:
    class_name = str(entry["class_name"])
    try:
        cls = import_class(class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{where}: {class_name} cannot be imported: {error}") from error
    if inspect.isclass(cls) and issubclass(cls, BaseTool):
        return cls(**(entry.get("config") or {}))
    return _built(where, cls, entry)


def _built(where: str, cls: Any, entry: Mapping[str, Any]) -> VerlTool:
    schema = entry.get("tool_schema")
    try:
        inner = cls(config=dict(entry.get("config") or {}), tool_schema=_model(schema))
        tool_schema = schema or _plain(inner.get_openai_tool_schema())
    except Exception as error:  # the user's constructor may raise anything
        raise ConfigError(f"{where}: {cls.__name__} cannot be built: {type(error).__name__}: {error}") from error
    if not isinstance(tool_schema, Mapping) or "function" not in tool_schema:
        raise ConfigError(f"{where} has no tool_schema with a function")
    return VerlTool(inner, tool_schema)


def _model(schema: Any) -> Any:
    """Return the schema as verl's own class if verl is installed, since its tools read the class's attributes."""
    if schema is None:
        return None
    try:
        schemas = importlib.import_module("verl.tools.schemas")
    except ImportError:
        return schema
    return schemas.OpenAIFunctionToolSchema.model_validate(schema)


def _plain(schema: Any) -> Any:
    dump = getattr(schema, "model_dump", None)
    return dump(exclude_none=True) if dump is not None else schema
