"""The loop ``program``: a command or function that uses the gateway like any OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import shlex
import signal
from collections.abc import Mapping
from typing import Any

from rollcast.contracts.agent_loop import AgentLoopSetup, BaseAgentLoop, Outcome
from rollcast.contracts.environment import BaseEnvironment
from rollcast.contracts.session import Session
from rollcast.errors import ConfigError
from rollcast_agents.gateway import Access, Gateway
from rollcast_agents.named import load_named
from rollcast_agents.runner import ProgramFailed
from rollcast_agents.threads import in_thread

__all__ = ["ProgramLoop"]

_LAST = 2000
"""Maximum characters of a failed command's output in its error."""
_GRACE_S = 2.0


class ProgramLoop(BaseAgentLoop):
    """A loop that runs a program for each task; the program returns or prints the reward.

    ``agent.program`` is ``module:function``: an ``async def`` (or a plain function, run in a thread) that is called
    with the task, the gateway's ``base_url`` and ``api_key``, and returns a reward, an :class:`Outcome` or None. With
    ``agent.program_kind=command`` it is a command, which receives the task as JSON on its standard input,
    ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` in its environment, and may print ``{"reward": 1.0}`` as its last line.

    Raises:
        ConfigError: ``agent.program`` is missing or cannot be imported.
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
        self._function: Any = None if self._command else load_named(program, "agent.program")

    async def run(self, task: Mapping[str, Any], session: Session, environment: BaseEnvironment | None) -> Outcome:
        with self._gateway.open(session, getattr(session, "sampling", None)) as access:
            value = await (self._execute(task, access) if self._command else self._call(task, access))
        if isinstance(value, Outcome):
            return value
        return Outcome(session.end or "done", reward=value, messages=access.conversation())

    async def _call(self, task: Mapping[str, Any], access: Access) -> Any:
        arguments = {"base_url": access.base_url, "api_key": access.api_key}
        try:
            if inspect.iscoroutinefunction(self._function):
                return await self._function(dict(task), **arguments)
            return await in_thread(self._function, dict(task), **arguments)
        except Exception as error:  # the user's code
            raise ProgramFailed(f"{self.setup.config.program} raised {type(error).__name__}: {error}") from error

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
            out, err = await process.communicate(json.dumps(dict(task), default=str).encode())
        except BaseException:
            await _end(process)
            raise
        if process.returncode:
            said = err.decode(errors="replace")[-_LAST:] or out.decode(errors="replace")[-_LAST:]
            raise ProgramFailed(f"{self._command[0]} ended with code {process.returncode}: {said.strip()}")
        return _reward_in(out.decode(errors="replace"))


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
