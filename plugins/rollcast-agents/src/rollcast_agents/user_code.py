"""The users' code of a run: tools, environments and programs, and a process that serves calls to them.

:func:`serve` runs in a process of its own (:mod:`rollcast_agents.code_processes`), which is why this module imports
neither engines nor renderers.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import os
import pickle
import resource
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from rollcast.errors import ConfigError, RollcastError
from rollcast_agents.contracts.environment import BaseEnvironment
from rollcast_agents.contracts.tool import BaseTool
from rollcast_agents.environments.plain import PlainEnvironment, build_environment
from rollcast_agents.environments.verl import VerlInteraction, load_interaction_config
from rollcast_agents.frames import MOST_BYTES, read_frame, write_frame
from rollcast_agents.named import load_named
from rollcast_agents.schemas import AgentConfig
from rollcast_agents.threads import abandoned_calls, in_thread
from rollcast_agents.tools.box import build_tool
from rollcast_agents.tools.verl import load_tool_config

__all__ = ["call_program", "environment_factory", "local_tools", "serve"]


def local_tools(config: AgentConfig) -> list[BaseTool]:
    """Return the tools of a config, except those of MCP servers."""
    tools = [build_tool(name, options) for name, options in config.tools.items()]
    return tools + (load_tool_config(config.tool_config_path) if config.tool_config_path is not None else [])


def environment_factory(config: AgentConfig) -> Callable[[], BaseEnvironment] | None:
    """Return a factory of environments, one per rollout; None if the run has none."""
    if config.interaction_config_path is not None:
        return functools.partial(VerlInteraction, load_interaction_config(config.interaction_config_path))
    if config.environment is not None:
        return functools.partial(build_environment, config.environment, config.environment_kwargs)
    return None


async def call_program(program: str, task: Mapping[str, Any], base_url: str, api_key: str) -> Any:
    """Return the value of a program's function, called with a task and the gateway's address."""
    function = load_named(program, "agent.program")
    if inspect.iscoroutinefunction(function):
        return await function(dict(task), base_url=base_url, api_key=api_key)
    return await in_thread(function, dict(task), base_url=base_url, api_key=api_key)


class _Episode:
    """An environment whose calls run one after the other in one task, as context variables and task groups need."""

    def __init__(self, environment: BaseEnvironment) -> None:
        self.environment = environment
        self._calls: asyncio.Queue[tuple[str, tuple[Any, ...], asyncio.Future[Any]] | None] = asyncio.Queue()
        self._task = asyncio.ensure_future(self._work())
        self._current: asyncio.Future[Any] | None = None

    async def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls.put_nowait((method, arguments, result))
        try:
            return await result
        except asyncio.CancelledError:
            if self._current is result:
                self._task.cancel()
            raise

    def end(self) -> None:
        """End the task after the calls so far."""
        self._calls.put_nowait(None)

    async def _work(self) -> None:
        while (call := await self._calls.get()) is not None:
            method, arguments, result = call
            if result.done():
                continue
            self._current = result
            try:
                value = await getattr(self.environment, method)(*arguments)
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is not None:
                    task.uncancel()
                result.cancel()
            except BaseException as error:  # noqa: BLE001  # the caller gets it
                if not result.done():
                    result.set_exception(error)
            else:
                if not result.done():
                    result.set_result(value)
            self._current = None


class _Service:
    """The users' code of this process, called by operation."""

    def __init__(self) -> None:
        self._config = AgentConfig()
        self._tools: dict[str, BaseTool] = {}
        self._make_environment: Callable[[], BaseEnvironment] | None = None
        self._episodes: dict[int, _Episode] = {}
        self._states: dict[int, Any] = {}
        self._numbers = itertools.count()

    async def start(self, config: AgentConfig) -> list[tuple[Any, int | None]]:
        """Build the tools; return the schema and the largest concurrency of each."""
        self._config = config
        tools = local_tools(config)
        self._tools = {str(tool.schema["function"]["name"]): tool for tool in tools}
        self._make_environment = environment_factory(config)
        if config.program is not None and config.program_kind == "function":
            load_named(config.program, "agent.program")
        if config.memory_limit_mb is not None:
            _limit_memory(config.memory_limit_mb << 20)
        return [(tool.schema, tool.max_concurrency) for tool in tools]

    async def ping(self) -> int:
        """Return the number of threads in which calls run that nobody waits for."""
        return abandoned_calls()

    async def build(self) -> tuple[int, str, dict[str, Any] | None]:
        """Build an environment; return its number, its class, and the schemas of a plain environment's methods."""
        if self._make_environment is None:
            raise ConfigError("the run has no environment")
        environment = self._make_environment()
        number = next(self._numbers)
        self._episodes[number] = _Episode(environment)
        if not isinstance(environment, PlainEnvironment):
            return number, type(environment).__name__, None
        return number, type(environment).__name__, {name: tool.schema for name, tool in environment.tools.items()}

    async def environment(self, number: int, method: str, *arguments: Any) -> Any:
        """Call a method of an environment; after its ``close`` it is forgotten."""
        episode = self._episodes[number]
        try:
            return await episode.call(method, arguments)
        finally:
            if method == "close":
                del self._episodes[number]
                episode.end()

    async def open_tool(self, episode: int | None, name: str, task: Mapping[str, Any]) -> int:
        """Create the state of a tool; return its number."""
        state = await self._tool(episode, name).open(task)
        number = next(self._numbers)
        self._states[number] = state
        return number

    async def call_tool(self, episode: int | None, name: str, state: int, arguments: Mapping[str, Any]) -> Any:
        """Call a tool with the state of a number."""
        return await self._tool(episode, name).call(self._states[state], arguments)

    async def release_tool(self, episode: int | None, name: str, state: int) -> None:
        """Release the state of a tool."""
        await self._tool(episode, name).release(self._states.pop(state))

    async def program(self, task: Mapping[str, Any], base_url: str, api_key: str) -> Any:
        """Call the run's program."""
        return await call_program(str(self._config.program), task, base_url, api_key)

    async def close(self) -> None:
        """Release the resources of the tools."""
        for tool in self._tools.values():
            await tool.close()

    def _tool(self, episode: int | None, name: str) -> BaseTool:
        if episode is None:
            return self._tools[name]
        environment = self._episodes[episode].environment
        if not isinstance(environment, PlainEnvironment):
            raise TypeError(f"{type(environment).__name__} has no tools of its own")
        return environment.tools[name]


def _limit_memory(extra: int) -> None:
    """Limit the address space to its current size plus ``extra`` bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + extra
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


# ---- the process ----


def serve(connection: socket.socket) -> None:
    """Serve the calls that arrive on a connection, until it is closed."""
    # The loop's own signal handling would hide an interrupt that the user's code sends to its process.
    asyncio.new_event_loop().run_until_complete(_serve(connection))


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    service, owner = _Service(), os.getpid()
    tasks: dict[int, asyncio.Task[None]] = {}

    async def answer(number: int, operation: str, data: bytes) -> None:
        kind, value = await _outcome(functools.partial(_called, service, operation, data))
        if os.getpid() != owner:  # the user's code forked, and this is the copy
            os._exit(0)
        write_frame(writer, (number, kind, value))
        await writer.drain()

    while (frame := await read_frame(reader)) is not None:
        number, operation, data = frame
        if operation == "cancel":
            if (task := tasks.get(number)) is not None:
                task.cancel()
            continue
        tasks[number] = asyncio.ensure_future(answer(number, operation, data))
        tasks[number].add_done_callback(lambda _, number=number: tasks.pop(number, None))  # type: ignore[misc]


async def _called(service: _Service, operation: str, data: bytes) -> Any:
    return await getattr(service, operation)(*pickle.loads(data))


async def _outcome(call: Callable[[], Awaitable[Any]]) -> tuple[str, bytes]:
    """Return the kind of a call's end (``value``, ``error``, ``raised``, ``exhausted`` or ``ended``) and its pickle."""
    try:
        data = pickle.dumps(await call())
    except RollcastError as error:
        return "error", pickle.dumps(error)
    except Exception as error:  # noqa: BLE001  # a user's code may raise anything
        kind = "exhausted" if _is_exhausted(error) else "raised"
        return kind, pickle.dumps((type(error).__name__, str(error)))
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001  # SystemExit and its kind end the rollout, not its neighbours
        return "ended", pickle.dumps((type(error).__name__, str(error)))
    if len(data) > MOST_BYTES:
        return "raised", pickle.dumps(
            ("ValueError", f"a result of {len(data) >> 20} MiB; at most {MOST_BYTES >> 20} MiB can be returned")
        )
    return "value", data


def _is_exhausted(error: Exception) -> bool:
    """Return True if the process has no memory or thread left, which may be another call's fault."""
    return isinstance(error, MemoryError) or str(error) == "can't start new thread"
