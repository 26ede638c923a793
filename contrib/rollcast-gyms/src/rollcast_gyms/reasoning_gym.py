"""The environment ``reasoning_gym``: procedural tasks of the public package of the same name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from rollcast.errors import ConfigError
from rollcast_agents.contracts.environment import BaseEnvironment, Observation
from rollcast_agents.contracts.renderer import Message
from rollcast_agents.threads import in_thread

__all__ = ["ReasoningGym"]


@lru_cache(maxsize=32)
def _dataset(name: str, size: int, seed: int, options: tuple[tuple[str, Any], ...]) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            "agent.environment=reasoning_gym needs the package reasoning-gym: "
            f'pip install "rollcast-gyms[reasoning-gym]" ({error})'
        ) from error
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **dict(options))
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(
            f"agent.environment_kwargs: reasoning_gym has no task {name!r} with {dict(options)}: {error}"
        ) from error


class ReasoningGym(BaseEnvironment):
    """An environment with one question and one answer, which the package scores.

    A dataset row may have ``task`` and ``index``, the entry of that task; otherwise the options provide the task.

    Args:
        task: name of the generator, such as ``basic_arithmetic``.
        size: number of its entries.
        seed: seed of the generator.
        options: further settings of the generator.
    """

    def __init__(
        self, task: str = "", size: int = 1000, seed: int = 0, options: Mapping[str, Any] | None = None
    ) -> None:
        self._task, self._size, self._seed = task, size, seed
        self._options = tuple(sorted((options or {}).items()))
        self._data: Any = None
        self._entry: Mapping[str, Any] = {}

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        name = str(task.get("task") or self._task)
        self._data = await in_thread(_dataset, name, self._size, self._seed, self._options)
        self._entry = self._data[int(task.get("index", 0)) % self._size]
        return Observation([{"role": "user", "content": self._entry["question"]}])

    async def step(self, message: Message) -> Observation:
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(message.text) or message.text.strip()
        return Observation(reward=self._data.score_answer(answer, self._entry), done=True)

    async def solution(self) -> Sequence[str] | None:
        # Tasks with many correct answers name none.
        answer = self._entry["answer"]
        return None if answer is None else [f"<answer>{answer}</answer>"]
