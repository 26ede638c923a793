"""verl's interactions as environments: classes derived from its ``BaseInteraction``, and the YAML files that list
them.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollcast.errors import ConfigError, EnvironmentFailed
from rollcast_agents.chat import as_chat
from rollcast_agents.contracts.environment import BaseEnvironment, Observation
from rollcast_agents.contracts.renderer import Message
from rollcast_agents.verl_files import awaited, import_class, read_entries

__all__ = ["VerlInteraction", "load_interaction_config"]


class VerlInteraction(BaseEnvironment):
    """An environment that wraps an interaction written for verl.

    The interaction has ``start_interaction``, ``generate_response`` and ``finalize_interaction``. A dataset row selects
    its interaction by ``extra_info.interaction_kwargs.name``, as in verl; without a name, the only interaction is used.
    The score of a turn is the reward of the preceding reply.

    Args:
        interactions: objects of the run, by name; they keep the state of each rollout by its instance id.
    """

    def __init__(self, interactions: Mapping[str, Any]) -> None:
        self._interactions = interactions
        self._inner: Any = None
        self._instance = ""
        self._kwargs: dict[str, Any] = {}
        self._messages: list[dict[str, Any]] = []

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        options = (task.get("extra_info") or {}).get("interaction_kwargs") or task.get("interaction_kwargs") or {}
        self._kwargs = {key: value for key, value in options.items() if key != "name"}
        self._inner = self._named(options.get("name"))
        self._messages = [dict(message) for message in task.get("prompt") or ()]
        instance = str(uuid.uuid4())
        started = await awaited(self._inner.start_interaction(instance, **self._kwargs))
        self._instance = str(started or instance)
        return Observation()

    async def step(self, message: Message) -> Observation:
        self._messages.append(as_chat(message))
        answer = self._inner.generate_response(self._instance, self._messages, **self._kwargs)
        is_over, text, score, _ = await awaited(answer)
        said = [] if is_over else [{"role": "user", "content": str(text)}]
        self._messages += said
        return Observation(said, reward=score, done=bool(is_over))

    async def close(self) -> None:
        if self._instance:
            await awaited(self._inner.finalize_interaction(self._instance, **self._kwargs))

    def _named(self, name: str | None) -> Any:
        if name is None and len(self._interactions) == 1:
            return next(iter(self._interactions.values()))
        if name is None or name not in self._interactions:
            raise EnvironmentFailed(
                f"the row names the interaction {name!r} in extra_info.interaction_kwargs.name; "
                f"agent.interaction_config_path has {', '.join(self._interactions)}"
            )
        return self._interactions[name]


def load_interaction_config(path: str | Path) -> dict[str, Any]:
    """Return the interactions of verl's YAML file by name.

    The file has a list ``interaction`` of entries with ``name``, ``class_name`` and ``config``.

    Raises:
        ConfigError: the file or a class cannot be read; the message names the entry.
    """
    key = "agent.interaction_config_path"
    loaded: dict[str, Any] = {}
    for where, entry in read_entries(key, path, "interaction").items():
        name, built = _interaction(where, entry)
        if name in loaded:
            raise ConfigError(f"{where} has the name {name!r}, which another entry already uses")
        loaded[name] = built
    if not loaded:
        raise ConfigError(f"{key}={path} has no entry in its list 'interaction'")
    return loaded


def _interaction(where: str, entry: Mapping[str, Any]) -> tuple[str, Any]:
    class_name = str(entry["class_name"])
    # verl names an interaction without a name by its class.
    name = str(entry.get("name") or class_name.rpartition(".")[2].lower().removesuffix("interaction"))
    try:
        return name, import_class(class_name)(config={**(entry.get("config") or {}), "name": name})
    except Exception as error:  # the user's module or constructor may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{where}: {class_name} cannot be imported and built: {reason}") from error
