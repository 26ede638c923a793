"""An environment, tools and a program that misbehave as a task says; light to import."""

from __future__ import annotations

from typing import Any

from rollcast.contracts.environment import BaseEnvironment, Observation
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
