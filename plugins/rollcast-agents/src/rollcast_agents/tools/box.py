"""The tools of a process, and the calls of one rollout: limits, state, errors as text."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollcast.errors import ConfigError
from rollcast_agents.contracts.tool import BaseTool, ToolResult
from rollcast_agents.contracts.tool import tools as registry
from rollcast_agents.ended import ProcessEnded
from rollcast_agents.named import load_named
from rollcast_agents.tools.functions import FunctionTool, as_result
from rollcast_data.chat_template import ToolCall, ToolSchema

__all__ = ["RolloutTools", "ToolBox", "ToolLimits", "build_tool"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ToolLimits:
    """Limits of every call.

    Attributes:
        timeout_s: maximum seconds of one call.
        max_length: maximum characters of a result that the model sees; the middle of a longer result is cut out.
        max_concurrency: maximum concurrent calls of one tool in a process, unless the tool sets its own limit; None for
            no limit.
    """

    timeout_s: float = 30.0
    max_length: int = 8192
    max_concurrency: int | None = None


def build_tool(name: str, options: Mapping[str, Any] | None = None) -> BaseTool:
    """Return the tool called ``name``.

    Args:
        name: name of a registered tool, or with the option ``path`` the name for the function found there.
        options: options of the tool. ``path`` is ``file.py:function`` or ``module:function``.

    Raises:
        PluginError: the tool does not exist or does not load.
        ConfigError: it does not accept these options.
    """
    options = dict(options or {})
    path = options.pop("path", None)
    plugin = registry.get(name) if path is None else load_named(str(path), f"agent.tools.{name}.path")
    if not inspect.isclass(plugin):
        if options:
            raise ConfigError(f"agent.tools.{name} is a plain function and takes no options, got {sorted(options)}")
        return FunctionTool(plugin, name)
    try:
        built = plugin(**options)
    except TypeError as error:
        raise ConfigError(f"agent.tools.{name} does not fit: {error}") from error
    return built if isinstance(built, BaseTool) else FunctionTool(_callable(name, built), name)


def _callable(name: str, built: object) -> Callable[..., Any]:
    if not callable(built):
        raise ConfigError(f"tool {name}: an object of {type(built).__name__} is not a BaseTool and not callable")
    return built


class ToolBox:
    """The tools of a process.

    Args:
        tools: tools ready to call.
        limits: limits of every call.

    Raises:
        ConfigError: two tools have the same name.
    """

    def __init__(self, tools: Iterable[BaseTool] = (), limits: ToolLimits | None = None) -> None:
        self.limits = limits or ToolLimits()
        self._tools: dict[str, BaseTool] = {}
        for tool in tools:
            name = str(tool.schema["function"]["name"])
            if name in self._tools:
                raise ConfigError(f"two tools are called {name!r}; the model could not tell them apart")
            self._tools[name] = tool
        self._slots = {name: self._slots_of(tool) for name, tool in self._tools.items()}

    def _slots_of(self, tool: BaseTool) -> asyncio.Semaphore | None:
        most = tool.max_concurrency or self.limits.max_concurrency
        return None if most is None else asyncio.Semaphore(most)

    @property
    def schemas(self) -> list[ToolSchema]:
        """Schemas of the tools, for the model."""
        return [tool.schema for tool in self._tools.values()]

    @contextlib.asynccontextmanager
    async def rollout(self, task: Mapping[str, Any]) -> AsyncIterator[RolloutTools]:
        """Yield the tools of one rollout; their state is released at the end, even on cancellation."""
        opened = RolloutTools(self._tools, self._slots, self.limits, task)
        try:
            yield opened
        finally:
            await asyncio.shield(opened.release())

    async def close(self) -> None:
        """Release the resources of the tools."""
        for tool in self._tools.values():
            await tool.close()


@dataclass(eq=False)
class RolloutTools:
    """The tool calls of one rollout.

    Attributes:
        counts: ``tool_calls``, ``tool_errors`` and ``tool/<name>/calls``.
        seconds: total seconds of all calls by tool name.
        failures: messages about calls that raised, timed out or returned too much text.
    """

    _tools: Mapping[str, BaseTool]
    _slots: Mapping[str, asyncio.Semaphore | None]
    _limits: ToolLimits
    _task: Mapping[str, Any]
    counts: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    _states: dict[str, tuple[BaseTool, asyncio.Task[Any]]] = field(default_factory=dict)

    @property
    def schemas(self) -> list[ToolSchema]:
        """Schemas of the tools, for the model."""
        return [tool.schema for tool in self._tools.values()]

    def with_tools(self, tools: Mapping[str, BaseTool]) -> RolloutTools:
        """Return the same calls with further tools, such as the methods of an environment."""
        slots = {**dict.fromkeys(tools), **self._slots}
        return RolloutTools(
            {**self._tools, **tools},
            slots,
            self._limits,
            self._task,
            self.counts,
            self.seconds,
            self.failures,
            self._states,
        )

    def knows(self, calls: Iterable[ToolCall]) -> bool:
        """Return True if every call is malformed or names an existing tool."""
        return all(call.error or call.name in self._tools for call in calls)

    async def call(self, call: ToolCall) -> ToolResult:
        """Run one call. Any failure becomes a result that the model sees."""
        name = call.name if call.name in self._tools else "unknown"
        start = time.monotonic()
        result = await self._answer(call)
        self.counts["tool_calls"] += 1
        self.counts["tool_errors"] += result.is_error
        self.counts[f"tool/{name}/calls"] += 1
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start
        if len(result.text) > self._limits.max_length:
            self.failures.append(
                f"{name} returned {len(result.text)} characters, of which the model saw {self._limits.max_length}."
            )
        return ToolResult(
            _shortened(result.text, self._limits.max_length), result.reward, result.metrics, result.is_error
        )

    async def _answer(self, call: ToolCall) -> ToolResult:
        if call.error:
            return ToolResult(call.error, is_error=True)
        if call.name not in self._tools:
            known = ", ".join(self._tools) or "none"
            return ToolResult(f"There is no tool {call.name!r}. The tools are: {known}.", is_error=True)
        try:
            async with asyncio.timeout(self._limits.timeout_s) as limit, self._slot(call.name):
                state = await self._state(call.name)
                return as_result(await self._tools[call.name].call(state, call.arguments))
        except TimeoutError as error:
            if not limit.expired():
                return self._failed(f"{call.name} failed: TimeoutError: {error}")
            return self._failed(f"{call.name} did not answer within {self._limits.timeout_s:g} s.")
        except ProcessEnded:
            raise  # the states of the rollout's tools are lost
        except Exception as error:  # a user's code may raise anything; the model sees the error
            logger.debug("tool %s raised", call.name, exc_info=True)
            return self._failed(f"{call.name} failed: {type(error).__name__}: {error}")

    def _failed(self, text: str) -> ToolResult:
        self.failures.append(text)
        return ToolResult(text, is_error=True)

    def _slot(self, name: str) -> contextlib.AbstractAsyncContextManager[Any]:
        return self._slots[name] or contextlib.nullcontext()

    async def _state(self, name: str) -> Any:
        # Calls of one turn run concurrently; the first opens the state for all of them.
        if name not in self._states:
            tool = self._tools[name]
            self._states[name] = tool, asyncio.ensure_future(tool.open(self._task))
        return await asyncio.shield(self._states[name][1])

    async def release(self) -> None:
        """Release the state of every opened tool; a failing one does not affect the others."""
        for name, (tool, opening) in self._states.items():
            try:
                async with asyncio.timeout(self._limits.timeout_s):
                    await tool.release(await opening)
            except ProcessEnded as error:
                logger.debug("tool %s has no state to release: %s", name, error)
            except Exception:  # a user's code must not prevent the rollout from ending
                logger.warning("tool %s could not release its state", name, exc_info=True)
        self._states.clear()


def _shortened(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = max((most - 40) // 2, 0)
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[len(text) - half :]}"
