"""Tools of MCP servers, through the official package ``mcp``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from rollcast.errors import ConfigError
from rollcast_agents.contracts.tool import BaseTool, ToolResult
from rollcast_data.chat_template import ToolSchema

__all__ = ["McpServer"]

_KEYS = ("url", "command", "args", "env", "cwd")


class McpServer:
    """A connection to one server: ``{"url": …}``, or ``{"command": …, "args": […], "env": {…}, "cwd": …}``.

    Args:
        name: name of the server in messages.
        options: URL, or command to start the server.
        timeout_s: seconds within which it must answer the connection.

    Raises:
        ConfigError: the options name no server, or the package ``mcp`` is missing.
    """

    def __init__(self, name: str, options: Mapping[str, Any], timeout_s: float = 30.0) -> None:
        unknown = sorted(set(options) - set(_KEYS))
        if unknown or ("url" in options) == ("command" in options):
            raise ConfigError(
                f"agent.mcp_servers.{name} has {sorted(options)}; it needs url, or command with args, env and cwd"
            )
        self._name, self._options, self._timeout_s = name, dict(options), timeout_s
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._client: Any = None

    def _target(self) -> Any:
        if "url" in self._options:
            return self._options["url"]
        try:
            from mcp import StdioServerParameters
        except ImportError as error:
            raise ConfigError(
                f'agent.mcp_servers needs the package mcp: pip install "rollcast-agents[mcp]" ({error})'
            ) from error
        return StdioServerParameters(**self._options)

    async def start(self) -> list[BaseTool]:
        """Connect and return the server's tools.

        Raises:
            ConfigError: the server does not respond.
        """
        ready: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        # A connection must be closed by the task that opened it.
        self._task = asyncio.ensure_future(self._hold(ready))
        try:
            async with asyncio.timeout(self._timeout_s):
                listed = await asyncio.shield(ready)
        except TimeoutError:
            await self.close()
            raise ConfigError(f"agent.mcp_servers.{self._name} did not answer within {self._timeout_s:g} s") from None
        except Exception as error:  # any transport
            raise ConfigError(f"agent.mcp_servers.{self._name}: {_first(error)}") from error
        return [_McpTool(self, tool) for tool in listed]

    async def _hold(self, ready: asyncio.Future[list[Any]]) -> None:
        try:
            from mcp.client import Client

            async with Client(self._target()) as client:
                self._client = client
                ready.set_result(list((await client.list_tools()).tools))
                await self._stop.wait()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool of the server."""
        if self._task is None or self._task.done():
            return ToolResult(f"The server {self._name} has ended.", is_error=True)
        answer = await self._client.call_tool(tool, dict(arguments))
        texts = [getattr(part, "text", f"[{getattr(part, 'type', 'part')}]") for part in answer.content]
        return ToolResult("\n".join(texts), is_error=bool(answer.is_error))

    async def close(self) -> None:
        """Disconnect; a server that was started by a command ends."""
        self._stop.set()
        if self._task is not None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(self._timeout_s):
                    await self._task
            self._task = None


def _first(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


class _McpTool(BaseTool):
    def __init__(self, server: McpServer, tool: Any) -> None:
        self._server, self._name = server, tool.name
        function = {"name": tool.name, "description": tool.description or "", "parameters": dict(tool.input_schema)}
        self._schema = {"type": "function", "function": function}

    @property
    def schema(self) -> ToolSchema:
        return self._schema

    async def call(self, state: Any, arguments: Mapping[str, Any]) -> ToolResult | str:
        return await self._server.call(self._name, arguments)
