"""The environment ``gem``: the environments of the public package gem-llm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollcast.errors import ConfigError
from rollcast_agents.contracts.environment import BaseEnvironment, Observation
from rollcast_agents.contracts.renderer import Message
from rollcast_gyms.own_random import OwnRandom

__all__ = ["Gem"]


class Gem(BaseEnvironment):
    """An episode of a gem environment. Each reply is an action; rewards are those of the steps.

    A dataset row may have ``env``; otherwise the options provide it. ``seed`` determines what the episode draws.

    gem-llm 0.1 pins versions of math-verify and reasoning-gym that hydra and this package's extras exclude. Install it
    with ``pip install --no-deps gem-llm``, and then the packages that its import needs.

    Args:
        env: id of the environment, such as ``game:GuessTheNumber-v0-easy``.
        options: arguments of the environment.
    """

    def __init__(self, env: str = "", options: Mapping[str, Any] | None = None) -> None:
        self._name, self._options = env, dict(options or {})
        self._env: Any = None
        self._random = OwnRandom(0)

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        name, seed = str(task.get("env") or self._name), int(task.get("seed", 0)) % 2**32
        self._random = OwnRandom(seed)

        def begin() -> str:
            self._env = _make(name, self._options)
            return _text(*self._env.reset(seed=seed))

        return Observation([{"role": "user", "content": await self._random.run(begin)}])

    async def step(self, message: Message) -> Observation:
        seen, reward, terminated, truncated, info = await self._random.run(lambda: self._env.step(message.text))
        text = _text(seen, info)
        said = [{"role": "user", "content": text}] if text else []
        return Observation(said, reward=reward, done=bool(terminated or truncated))

    async def solution(self) -> Sequence[str] | None:
        # Questions have an answer; games store theirs in different ways.
        entry = getattr(self._env, "data", None)
        answer = entry.get("answer") if isinstance(entry, Mapping) else getattr(self._env, "answer", None)
        return None if answer is None else [f"<answer>{answer}</answer> \\boxed{{{answer}}}"]


def _text(seen: Any, info: Mapping[str, Any]) -> str:
    """Return the text for the model: an observation, followed by its environment's suffix."""
    return "\n".join(part for part in (str(seen).rstrip("\n"), str(info.get("suffix", ""))) if part)


def _make(name: str, options: Mapping[str, Any]) -> Any:
    try:
        import gem
    except ImportError as error:
        raise ConfigError(
            f"agent.environment=gem needs the package gem-llm: pip install --no-deps gem-llm ({error})"
        ) from error
    if not name:
        raise ConfigError(
            "agent.environment=gem needs agent.environment_kwargs.env, such as game:GuessTheNumber-v0-easy"
        )
    try:
        return gem.make(name, **options)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"agent.environment_kwargs: gem has no environment {name!r} with {options}: {error}"
        ) from error
