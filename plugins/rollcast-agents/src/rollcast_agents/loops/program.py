"""The loop ``program``: a command or function that uses the gateway like any OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
from collections.abc import Mapping
from typing import Any

from rollcast.errors import ConfigError
from rollcast_agents.code_processes import current_process
from rollcast_agents.contracts.agent_loop import AgentLoopSetup, BaseAgentLoop, Outcome
from rollcast_agents.contracts.environment import BaseEnvironment
from rollcast_agents.contracts.session import Session
from rollcast_agents.ended import ProcessEnded
from rollcast_agents.gateway import Access, Gateway
from rollcast_agents.runner import ProgramFailed
from rollcast_agents.user_code import call_program

__all__ = ["ProgramLoop"]

_LAST = 2000
"""Maximum characters of a failed command's output in its error."""
#: Bytes of a command's output that are kept.
_KEPT = 1 << 20
_CHUNK = 1 << 16
_GRACE_S = 2.0


class ProgramLoop(BaseAgentLoop):
    """A loop that runs a program for each task; the program returns or prints the reward.

    ``agent.program`` is ``module:function``: an ``async def`` (or a plain function, run in a thread) that is called
    with the task, the gateway's ``base_url`` and ``api_key``, and returns a reward, an :class:`Outcome` or None. With
    ``agent.program_kind=command`` it is a command, which receives the task as JSON on its standard input,
    ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` in its environment, and may print ``{"reward": 1.0}`` as its last line.

    Raises:
        ConfigError: ``agent.program`` is missing.
    """

    def __init__(self, setup: AgentLoopSetup) -> None:
        super().__init__(setup)
        program = setup.config.program
        if not program:
            raise ConfigError("agent.loop=program needs agent.program: module:function, or a command")
        if not isinstance(setup.gateway, Gateway):
            raise ConfigError("agent.loop=program needs the run's gateway")
        self._gateway = setup.gateway
        self._command = shlex.split(program) if setup.config.program_kind == "command" else []

    async def run(self, task: Mapping[str, Any], session: Session, environment: BaseEnvironment | None) -> Outcome:
        with self._gateway.open(session, getattr(session, "sampling", None)) as access:
            value = await (self._execute(task, access) if self._command else self._call(task, access))
        if isinstance(value, Outcome):
            return value
        return Outcome(session.end or "done", reward=value, messages=access.conversation())

    async def _call(self, task: Mapping[str, Any], access: Access) -> Any:
        program, process = str(self.setup.config.program), current_process()
        arguments = dict(task), access.base_url, access.api_key
        try:
            if process is None:
                return await call_program(program, *arguments)
            return await process.call("program", program, "program", *arguments)
        except ProcessEnded:
            raise
        except Exception as error:  # the user's code
            raise ProgramFailed(f"{program} raised {type(error).__name__}: {error}") from error

    async def _execute(self, task: Mapping[str, Any], access: Access) -> Any:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "OPENAI_BASE_URL": access.base_url, "OPENAI_API_KEY": access.api_key},
            start_new_session=True,
        )
        try:
            out, err = await _run(process, json.dumps(dict(task), default=str).encode())
        finally:
            await _end(process)
        if process.returncode:
            said = err[-_LAST:] or out[-_LAST:]
            raise ProgramFailed(f"{self._command[0]} ended with code {process.returncode}: {said.strip()}")
        return _reward_in(out)


async def _run(process: asyncio.subprocess.Process, task: bytes) -> tuple[str, str]:
    """Return the ends of a command's output and of its errors, after its end."""
    reading = [asyncio.ensure_future(_end_of(stream)) for stream in (process.stdout, process.stderr)]
    try:
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                process.stdin.write(task)
                await process.stdin.drain()
            process.stdin.close()
        await process.wait()
        # A process that the command leaves behind may keep the streams open.
        await asyncio.wait(reading, timeout=_GRACE_S)
        out, err = (bytes(reader.result()) if reader.done() else b"" for reader in reading)
        return out.decode(errors="replace"), err.decode(errors="replace")
    finally:
        for reader in reading:
            reader.cancel()


async def _end_of(stream: asyncio.StreamReader | None) -> bytes:
    """Read a stream to its end; return its last bytes, since a program may write without end."""
    tail = b""
    while stream is not None and (part := await stream.read(_CHUNK)):
        tail = (tail + part)[-_KEPT:]
    return tail


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a command and every process that it started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await process.wait()
                return


def _reward_in(output: str) -> Any:
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "")
    try:
        value = json.loads(last)
    except ValueError:
        return None
    return value.get("reward") if isinstance(value, dict) else None
