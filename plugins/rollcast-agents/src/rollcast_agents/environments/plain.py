"""Plain classes as environments: public methods are tools, ``reset`` starts, ``get_reward`` scores."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollcast.errors import ConfigError
from rollcast_agents.contracts.environment import BaseEnvironment, Observation, environments
from rollcast_agents.contracts.renderer import Message
from rollcast_agents.contracts.tool import BaseTool
from rollcast_agents.threads import in_thread
from rollcast_agents.tools.functions import FunctionTool, public_methods

__all__ = ["PlainEnvironment", "build_environment"]

_OWN = frozenset({"reset", "step", "close", "get_reward", "is_done"})


class PlainEnvironment(BaseEnvironment):
    """An environment that wraps an object of any class.

    Args:
        owner: the object. ``reset(**task)`` may return a prompt as text or messages; ``get_reward()`` returns the
            reward at the end; ``is_done()`` returns True to end early; ``close()`` releases resources. All are optional
            and may be ``async``.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        #: Public methods of the object as tools.
        self.tools: Mapping[str, BaseTool] = {
            name: FunctionTool(method, name) for name, method in public_methods(owner, _OWN).items()
        }

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        began = await self._ask("reset", **task)
        return Observation(_as_messages(began), [tool.schema for tool in self.tools.values()])

    async def step(self, message: Message) -> Observation:
        """Return the observation of the class's ``step``; without one, end the episode with the reply as the answer."""
        answer = await self._ask("step", message.text)
        if isinstance(answer, Observation):
            return answer
        reward = await self._ask("get_reward")
        return Observation(_as_messages(answer), reward=reward, done=True)

    async def done_early(self) -> bool:
        """Return True if the episode is over after a tool call."""
        return bool(await self._ask("is_done"))

    async def close(self) -> None:
        await self._ask("close")

    async def _ask(self, name: str, *arguments: Any, **task: Any) -> Any:
        method = getattr(self._owner, name, None)
        if method is None:
            return None
        if inspect.iscoroutinefunction(method):
            return await method(*arguments, **_taken(method, task))
        return await in_thread(method, *arguments, **_taken(method, task))


def _taken(method: Callable[..., Any], task: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a task that a method accepts; all if it accepts ``**kwargs``."""
    parameters = inspect.signature(method).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(task)
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in task.items() if name in names}


def _as_messages(value: Any) -> Sequence[Mapping[str, Any]]:
    if value is None:
        return ()
    return [{"role": "user", "content": value}] if isinstance(value, str) else list(value)


def build_environment(name: str, options: Mapping[str, Any] | None = None) -> BaseEnvironment:
    """Return a new environment of the class registered as ``name``.

    Raises:
        PluginError: the environment does not exist or does not load.
        ConfigError: it does not accept these options.
    """
    plugin = environments.get(name)
    try:
        built = plugin(**dict(options or {}))
    except TypeError as error:
        raise ConfigError(f"agent.environment_kwargs do not fit the environment {name!r}: {error}") from error
    return built if isinstance(built, BaseEnvironment) else PlainEnvironment(built)
