"""Contract of environments: worlds that answer a model's messages and may score them.

A plain class is enough: its public methods are tools, and ``reset(**task)`` may return the first prompt::

    class Counter:
        \"\"\"Counts as it is told.\"\"\"

        def reset(self, start: int, **task) -> str:
            self.value = start
            return f"Add up to 10. You begin at {start}."

        def add(self, number: int) -> str:
            \"\"\"Add a number.\"\"\"
            self.value += number
            return str(self.value)

        def get_reward(self) -> float:
            return float(self.value == 10)

Announce it in the group ``rollcast.environments``; the config names it as ``agent.environment``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollcast.plugins import Registry, is_class

if TYPE_CHECKING:
    from rollcast.contracts.renderer import ChatMessage, Message, ToolSchema

__all__ = ["BaseEnvironment", "Observation", "environments"]


@dataclass(frozen=True)
class Observation:
    """What an environment answers.

    Attributes:
        messages: new messages of the conversation, in OpenAI's chat format.
        tools: tools from now on; None for those before.
        reward: reward for the message that led here; None if it has none of its own.
        done: True if the episode is over.
        components: named parts of the reward, for metrics.
        metrics: further numbers.
    """

    messages: Sequence[ChatMessage] = ()
    tools: Sequence[ToolSchema] | None = None
    reward: float | None = None
    done: bool = False
    components: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


class BaseEnvironment(ABC):
    """One episode's world; one instance serves one rollout. Built with ``agent.environment_kwargs``."""

    @abstractmethod
    async def reset(self, task: Mapping[str, Any]) -> Observation:
        """Begin an episode; the same task begins the same episode.

        Args:
            task: row of the dataset, with ``seed`` for environments that draw random numbers.
        """

    @abstractmethod
    async def step(self, message: Message) -> Observation:
        """Answer a reply of the model."""

    async def solution(self) -> Sequence[str] | None:
        """Return replies that together earn the reward 1 in the episode that has begun; None if they are not known.

        ``rollcast validate-task`` plays them.
        """
        return None

    async def close(self) -> None:
        """Free what the episode holds; called once, also when the rollout is interrupted."""
        return


environments: Registry[type[Any]] = Registry(
    "rollcast.environments",
    is_class,
    "agent.environment",
    description="worlds that answer a model's messages",
)
