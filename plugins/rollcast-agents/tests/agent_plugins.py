"""Tools and environments of these tests, in a module that a process for users' code imports quickly."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from rollcast_agents.contracts.environment import BaseEnvironment, Observation
from rollcast_agents.contracts.renderer import Message
from rollcast_agents.contracts.tool import BaseTool, ToolResult


def block(key: str) -> str:
    """Block."""
    time.sleep(3600.0)
    return key


class Look(BaseTool):
    """Answers at once, except where the task says otherwise."""

    @property
    def schema(self) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {"key": {"type": "string"}}}
        return {"type": "function", "function": {"name": "look", "description": "", "parameters": parameters}}

    async def open(self, task: Any) -> str:
        return str(task["kind"])

    async def call(self, state: Any, arguments: Any) -> str:
        if state == "hangs":
            await asyncio.Event().wait()
        if state == "raises":
            raise KeyError("nothing there")
        return "x" * 100_000 if state == "floods" else f"found {arguments['key']}"


class World(BaseEnvironment):
    """Ends with the first answer, except where the task says otherwise."""

    async def reset(self, task: Any) -> Observation:
        self.kind = task["kind"]
        return Observation()

    async def step(self, message: Any) -> Observation:
        if self.kind == "dies":
            raise OSError("the world ended")
        return Observation(reward=1.0, done=True)


class Letters(BaseTool):
    """Counts letters, and rewards a vowel."""

    def __init__(self, reward: float = 0.0) -> None:
        self.reward = reward

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "letters", "description": "", "parameters": {}}}

    async def open(self, task: Any) -> dict[str, int]:
        return {"calls": 0}

    async def call(self, state: Any, arguments: Any) -> ToolResult:
        state["calls"] += 1
        found = len(set(arguments["text"]) & set("aeiou"))
        return ToolResult(f"{found} vowels, call {state['calls']}", self.reward * found)


class Vowels(BaseEnvironment):
    """Asks for vowels three times, and rewards each one."""

    async def reset(self, task: Any) -> Observation:
        self.left = 3
        return Observation([{"role": "user", "content": "vowels!"}])

    async def step(self, message: Message) -> Observation:
        self.left -= 1
        found = float(bool(set(message.text) & set("aeiouAEIOU")))
        again = [{"role": "user", "content": f"{self.left} more"}]
        return Observation(again if self.left else (), reward=found, done=not self.left, components={"vowels": found})


class Dying(Vowels):
    """Dies in some of its steps."""

    lock = threading.Lock()
    count = 0

    async def step(self, message: Message) -> Observation:
        with self.lock:
            type(self).count += 1
            dies = self.count % 7 == 0
        if dies:
            raise OSError("the world ended")
        return await super().step(message)


class Killing(Vowels):
    """Kills the replica of the run that it belongs to, in one step of all.

    Args:
        once: file that exists after the kill.
    """

    def __init__(self, once: str) -> None:
        self.once = Path(once)

    async def step(self, message: Message) -> Observation:
        with contextlib.suppress(FileExistsError):
            self.once.touch(exist_ok=False)
            # Environment, forking process, driver.
            driver = psutil.Process().parent().parent()
            (replica,) = [each for each in driver.children() if "rollcast_serving.process" in each.cmdline()]
            replica.kill()
        return await super().step(message)
