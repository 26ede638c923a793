"""Tools of verifiers' toolsets, called in this process instead of a server."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from rollcast_agents.contracts.tool import BaseTool, ToolResult
from rollcast_agents.threads import in_thread
from rollcast_agents.tools.functions import FunctionTool
from rollcast_data.chat_template import ToolSchema

__all__ = ["started_tools"]


class _Method(BaseTool):
    """A method of a toolset.

    Args:
        name: name that the model calls.
        method: bound method.
        state: state of the rollout, which the toolset reads and writes as ``self.state``.
    """

    def __init__(self, name: str, method: Callable[..., Any], state: Any) -> None:
        self._state = state
        self._inner = FunctionTool(self._with_state(method), name)

    @property
    def schema(self) -> ToolSchema:
        return self._inner.schema

    async def call(self, state: Any, arguments: Mapping[str, Any]) -> ToolResult | str:
        return await self._inner.call(state, arguments)

    def _with_state(self, method: Callable[..., Any]) -> Callable[..., Any]:
        # The only way to set a toolset's state without a server; a context variable, so it applies to this call alone.
        from verifiers.v1.mcp.server import _call_state

        async def call(*arguments: Any, **named: Any) -> Any:
            token = _call_state.set(self._state)
            try:
                if inspect.iscoroutinefunction(method):
                    return await method(*arguments, **named)
                return await in_thread(method, *arguments, **named)
            finally:
                _call_state.reset(token)

        # Schema and docstring are derived from the method.
        call.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
        call.__annotations__ = inspect.get_annotations(method, eval_str=True)
        call.__name__ = call.__qualname__ = method.__name__
        call.__doc__ = method.__doc__
        return call


@contextlib.asynccontextmanager
async def started_tools(
    shared: Sequence[Any], own: Sequence[Any], data: Any, state: Any
) -> AsyncIterator[list[BaseTool]]:
    """Yield the tools of toolsets after setting them up for a task.

    Args:
        shared: toolsets of the taskset.
        own: toolsets of the task.
        data: data of the task.
        state: state of the rollout.
    """
    from verifiers.v1.utils.decorators import discover_decorated

    async with contextlib.AsyncExitStack() as stack:
        tools: list[BaseTool] = []
        for toolset in (*shared, *own):
            # A toolset registers its resources in this stack, which its server would close.
            await stack.enter_async_context(toolset._exit_stack)
            await toolset.setup()
            if toolset in own:
                await toolset.setup_task(data)
            prefix = f"{toolset.server_name}_" if toolset.server_name else ""
            for method in discover_decorated(toolset, "tool"):
                name = getattr(method, "tool_name", None) or method.__name__
                tools.append(_Method(f"{prefix}{name}", method, state))
        yield tools
