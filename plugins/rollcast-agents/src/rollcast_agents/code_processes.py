"""Processes in which the users' code of rollouts runs, so that it cannot end or hang the run.

All rollouts share one process, and with it the state of modules and classes. If it ends or hangs, each of its rollouts
runs again from its start in a process of its own. What ends or hangs there is its own rollout's fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import pickle
from collections.abc import AsyncIterator, Mapping
from contextvars import ContextVar
from typing import Any

from rollcast.contracts.user_processes import UserProcess, UserProcesses, describe_status
from rollcast.errors import ConfigError
from rollcast_agents.contracts.environment import BaseEnvironment, Observation
from rollcast_agents.contracts.renderer import Message
from rollcast_agents.contracts.tool import BaseTool, ToolResult
from rollcast_agents.contracts.trajectory import Boundary
from rollcast_agents.ended import ProcessEnded
from rollcast_agents.frames import read_frame, write_frame
from rollcast_agents.schemas import AgentConfig
from rollcast_agents.threads import in_thread
from rollcast_data.chat_template import ToolSchema

__all__ = ["CodeProcess", "CodeProcesses", "RemoteEnvironment", "current_process", "needs_process"]

logger = logging.getLogger(__name__)

#: Maximum seconds for a process to import the users' modules and build the tools.
_LOAD_S = 600.0
#: Maximum seconds for a process to answer that it is not blocked.
_ANSWER_S = 3.0
_CLOSE_S = 10.0
_CURRENT: ContextVar[CodeProcess | None] = ContextVar("rollcast_code_process", default=None)


def needs_process(config: AgentConfig) -> bool:
    """Return True if rollouts of a config call users' code."""
    is_function = config.program is not None and config.program_kind == "function"
    has_environment = config.environment is not None or config.interaction_config_path is not None
    return bool(config.tools) or config.tool_config_path is not None or has_environment or is_function


def current_process() -> CodeProcess | None:
    """Return the process of the rollout that the calling task belongs to; None outside a host."""
    return _CURRENT.get()


class CodeProcess:
    """A process that serves calls to users' code; used from one event loop.

    Args:
        process: the child, whose entry is :func:`rollcast_agents.user_code.serve`.
        is_private: True if the process serves a single rollout.
    """

    def __init__(self, process: UserProcess, is_private: bool) -> None:
        self.is_private = is_private
        #: Number of rollouts that use the process.
        self.rollouts = 0
        #: Description of its end; empty while it lives.
        self.end_text = ""
        self._process = process
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[tuple[str, bytes]]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._had_late_call = False

    async def start(self, config: AgentConfig) -> list[tuple[ToolSchema, int | None]]:
        """Connect, and build the tools; return schema and largest concurrency of each.

        Raises:
            ConfigError: a tool or the environment cannot be built.
            ProcessEnded: the code ended the process.
        """
        reader, self._writer = await asyncio.open_connection(sock=self._process.connection)
        self._reading = asyncio.ensure_future(self._read(reader))
        async with asyncio.timeout(_LOAD_S):
            schemas: list[tuple[ToolSchema, int | None]] = await self.call("tool", "the start", "start", config)
        return schemas

    async def call(self, boundary: Boundary, what: str, operation: str, *arguments: Any) -> Any:
        """Return the value of an operation of the process.

        Args:
            boundary: part of the rollout that is called.
            what: name of the call, for messages.
            operation: method of the service in the process.
            arguments: its arguments.

        Raises:
            ProcessEnded: the process ended or hangs, or the code raised an exception that ends a process.
            Exception: the error of the code, or a class of its name with its text.
        """
        if self.end_text:
            raise self._ended(boundary, what)
        number = next(self._numbers)
        self._waiting[number] = future = asyncio.get_running_loop().create_future()
        try:
            self._send(number, operation, pickle.dumps(arguments))
            kind, data = await future
        except asyncio.CancelledError:
            self._send(number, "cancel", b"")
            self._had_late_call = True
            if await self._abandoned() is None:
                self.end("did not answer")
                raise self._ended(boundary, what) from None
            raise
        finally:
            self._waiting.pop(number, None)
        return self._value(boundary, what, kind, data)

    def _value(self, boundary: Boundary, what: str, kind: str, data: bytes) -> Any:
        if kind == "exhausted" and not self.is_private:
            self.end("had no memory or no thread left")
        if self.end_text:
            raise self._ended(boundary, what)
        message = pickle.loads(data)
        if kind == "value":
            return message
        if kind == "error":
            raise message
        name, text = message
        if kind == "ended":
            raise ProcessEnded(f"{what} raised {name}: {text}" if text else f"{what} raised {name}", boundary, True)
        raise type(name, (Exception,), {})(text)

    def _ended(self, boundary: Boundary, what: str) -> ProcessEnded:
        return ProcessEnded(f"{what} failed: its process {self.end_text}", boundary, self.is_private)

    def _send(self, number: int, operation: str, data: bytes) -> None:
        if self._writer is not None and not self.end_text:
            write_frame(self._writer, (number, operation, data))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while (frame := await read_frame(reader)) is not None:
                number, kind, data = frame
                future = self._waiting.get(number)
                if future is not None and not future.done():
                    future.set_result((kind, data))
        except Exception:  # the user's code wrote into the connection
            logger.debug("a process of users' code sent something else than an answer", exc_info=True)
        self.end()

    async def _abandoned(self) -> int | None:
        """Return the number of threads whose calls nobody waits for; None if the process does not answer in time."""
        number = next(self._numbers)
        self._waiting[number] = future = asyncio.get_running_loop().create_future()
        self._send(number, "ping", pickle.dumps(()))
        try:
            await asyncio.wait({future}, timeout=_ANSWER_S)
        finally:
            self._waiting.pop(number, None)
        if self.end_text or not future.done():
            return None
        kind, data = future.result()
        return int(pickle.loads(data)) if kind == "value" else None

    async def is_usable(self) -> bool:
        """Return True if further rollouts can use the process: it lives, and no late call occupies a thread of it."""
        return not self.end_text and not (self._had_late_call and await self._abandoned() != 0)

    def end(self, why: str = "") -> None:
        """End the process; its calls fail.

        Args:
            why: reason in the past tense; by default the exit status.
        """
        if self.end_text:
            return
        self.end_text = why or "ended"
        if self._writer is not None:
            # The event loop must forget the descriptor before it is closed and used again.
            self._writer.transport.abort()
        status = self._process.end()
        if not why:
            self.end_text = f"ended ({describe_status(status)})"
        for future in self._waiting.values():
            if not future.done():
                future.set_result(("gone", b""))

    async def close(self) -> None:
        """Release the resources of the tools, then end the process."""
        if not self.end_text:
            with contextlib.suppress(TimeoutError, ProcessEnded):
                async with asyncio.timeout(_CLOSE_S):
                    await self.call("tool", "close", "close")
        self.end()
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=_CLOSE_S)


class CodeProcesses:
    """The processes of a host: one that rollouts share, and one for each rollout that runs again.

    Args:
        config: section ``agent``.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._source = UserProcesses("rollcast_agents.user_code:serve", ("rollcast.tools", "rollcast.environments"))
        self._shared: CodeProcess | None = None
        self._all: set[CodeProcess] = set()
        self._starting = asyncio.Lock()

    async def start(self) -> list[BaseTool]:
        """Start the shared process; return its tools.

        Raises:
            ConfigError: a tool cannot be built.
        """
        try:
            process, answer = await self._started(is_private=False)
        except ProcessEnded as error:
            raise ConfigError(f"agent: the tools and environments cannot be loaded: {error}") from error
        self._shared = process
        return [_RemoteTool(None, schema, most) for schema, most in answer]

    async def _started(self, is_private: bool) -> tuple[CodeProcess, list[tuple[ToolSchema, int | None]]]:
        child = await in_thread(self._source.fork)
        process = CodeProcess(child, is_private)
        self._all.add(process)
        try:
            return process, await process.start(self._config)
        except BaseException:
            self._drop(process)
            raise

    def _drop(self, process: CodeProcess) -> None:
        process.end()
        self._all.discard(process)

    @contextlib.asynccontextmanager
    async def rollout(self, is_private: bool) -> AsyncIterator[CodeProcess]:
        """Make a process the current one of a rollout, for the calling task and the tasks that it starts.

        Args:
            is_private: True for a process of the rollout's own, which is ended with it.
        """
        process = await self._own() if is_private else await self._joined()
        process.rollouts += 1
        token = _CURRENT.set(process)
        try:
            yield process
        finally:
            _CURRENT.reset(token)
            process.rollouts -= 1
            if is_private:
                self._drop(process)

    async def _own(self) -> CodeProcess:
        return (await self._started(is_private=True))[0]

    async def _joined(self) -> CodeProcess:
        async with self._starting:
            process = self._shared
            if process is not None and not process.rollouts and not await process.is_usable():
                self._drop(process)
            if process is None or process.end_text:
                if process is not None:
                    self._all.discard(process)
                process = self._shared = (await self._started(is_private=False))[0]
            return process

    async def close(self) -> None:
        """Release the tools' resources, and end all processes."""
        if self._shared is not None:
            await self._shared.close()
        for process in list(self._all):
            self._drop(process)
        await in_thread(self._source.close)


# ---- what a rollout calls ----


def _process_of(boundary: Boundary, what: str) -> CodeProcess:
    process = current_process()
    if process is None:
        raise ProcessEnded(f"{what} was called outside a rollout", boundary, True)
    return process


class _RemoteTool(BaseTool):
    """A tool in the process of the current rollout.

    Args:
        episode: number of the plain environment that the tool is a method of; None for a tool of the run.
        schema: schema of the tool.
        most: largest number of calls at once; None for no limit of its own.
    """

    def __init__(self, episode: int | None, schema: ToolSchema, most: int | None = None) -> None:
        self._episode, self._schema = episode, schema
        self._name = str(schema["function"]["name"])
        self.max_concurrency = most  # type: ignore[misc]  # a class variable of the tools that it stands for

    @property
    def schema(self) -> ToolSchema:
        return self._schema

    async def open(self, task: Mapping[str, Any]) -> Any:
        return await self._ask("open_tool", task)

    async def call(self, state: Any, arguments: Mapping[str, Any]) -> ToolResult | str:
        result: ToolResult | str = await self._ask("call_tool", state, arguments)
        return result

    async def release(self, state: Any) -> None:
        await self._ask("release_tool", state)

    async def _ask(self, operation: str, *arguments: Any) -> Any:
        process = _process_of("tool", self._name)
        return await process.call("tool", self._name, operation, self._episode, self._name, *arguments)


class RemoteEnvironment(BaseEnvironment):
    """An environment in the process of the current rollout.

    Attributes:
        class_name: name of its class.
        tools: methods of a plain environment as tools; None for other environments.
    """

    def __init__(
        self, process: CodeProcess, number: int, class_name: str, tools: Mapping[str, ToolSchema] | None
    ) -> None:
        self._process, self._number, self.class_name = process, number, class_name
        self.tools: Mapping[str, BaseTool] | None = (
            None if tools is None else {name: _RemoteTool(number, schema) for name, schema in tools.items()}
        )

    @classmethod
    async def build(cls) -> RemoteEnvironment:
        """Build the environment of the current rollout."""
        process = _process_of("environment", "the environment")
        return cls(process, *await process.call("environment", "the environment's constructor", "build"))

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        observation: Observation = await self._ask("reset", task)
        return observation

    async def step(self, message: Message) -> Observation:
        observation: Observation = await self._ask("step", message)
        return observation

    async def done_early(self) -> bool:
        """Return True if the episode is over after a tool call."""
        return bool(await self._ask("done_early"))

    async def close(self) -> None:
        await self._ask("close")

    async def _ask(self, method: str, *arguments: Any) -> Any:
        what = f"{self.class_name}.{method}"
        return await self._process.call("environment", what, "environment", self._number, method, *arguments)
