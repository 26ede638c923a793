"""An environment, tools and a program that misbehave as a task says; light to import."""

from __future__ import annotations

from typing import Any

import aiohttp

from rollcast_agents.contracts.environment import BaseEnvironment, Observation
from rollcast_agents.contracts.tool import BaseTool
from rollcast_testing.misbehaviour import misbehave


class World(BaseEnvironment):
    """Misbehaves in its step, on the event loop."""

    async def reset(self, task: Any) -> Observation:
        self.case = task["case"]
        return Observation()

    async def step(self, message: Any) -> Observation:
        misbehave(self.case)
        return Observation(reward=1.0, done=True)


def look(key: str) -> str:
    """Misbehave as the key says."""
    misbehave(key)
    return f"found {key}"


async def look_async(key: str) -> str:
    """Misbehave as the key says, on the event loop."""
    misbehave(key)
    return f"found {key}"


async def program(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Misbehave on the event loop."""
    misbehave(task["case"])
    return 1.0


class Letters(BaseTool):
    """A tool of the name ``letters`` that misbehaves as the task says, on the event loop."""

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "letters", "description": "", "parameters": {}}}

    async def open(self, task: Any) -> str:
        return str(task["case"])

    async def call(self, state: Any, arguments: Any) -> str:
        misbehave(state)
        return "found"


async def talk(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Sample a reply, then misbehave on the event loop."""
    headers = {"Authorization": f"Bearer {api_key}"}
    url, body = f"{base_url}/chat/completions", {"messages": list(task["prompt"])}
    async with aiohttp.ClientSession(headers=headers) as client, client.post(url, json=body) as response:
        await response.json()
    misbehave(task["case"])
    return 1.0


def score(sample: Any) -> float:
    """Misbehave as the ground truth says."""
    misbehave(sample.ground_truth)
    return 1.0
