"""Contract of environments, which answer a model's messages and may score them.

A plain class is enough: its public methods become tools, and ``reset(**task)`` may return the first prompt::

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

Register it in the entry-point group ``rollcast.environments`` and select it with ``agent.environment``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollcast.plugins import Registry, is_class

if TYPE_CHECKING:
    from rollcast_agents.contracts.renderer import Message
    from rollcast_data.chat_template import ChatMessage, ToolSchema

__all__ = ["BaseEnvironment", "Observation", "environments"]


@dataclass(frozen=True)
class Observation:
    """An environment's answer to a message.

    Attributes:
        messages: new messages of the conversation, in OpenAI's chat format.
        tools: tools available from now on; None to keep the current ones.
        reward: reward for the answered message; None if this message has no reward of its own.
        done: True if the episode is over.
        components: named parts of the reward, for metrics.
        metrics: further metrics.
    """

    messages: Sequence[ChatMessage] = ()
    tools: Sequence[ToolSchema] | None = None
    reward: float | None = None
    done: bool = False
    components: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


class BaseEnvironment(ABC):
    """Base class of environments. One instance serves one rollout, built with ``agent.environment_kwargs``."""

    @abstractmethod
    async def reset(self, task: Mapping[str, Any]) -> Observation:
        """Start an episode; the same task must start the same episode.

        Args:
            task: row of the dataset, with ``seed`` for environments that draw random numbers.
        """

    @abstractmethod
    async def step(self, message: Message) -> Observation:
        """Answer a reply of the model with an observation."""

    async def solution(self) -> Sequence[str] | None:
        """Return replies that earn a total reward of 1 in the current episode; None if unknown.

        ``rollcast validate-task`` plays these replies.
        """
        return None

    async def close(self) -> None:
        """Release the episode's resources; called once, also when the rollout is interrupted."""
        return


environments: Registry[type[Any]] = Registry(
    "rollcast.environments",
    is_class,
    "agent.environment",
    description="environments that answer a model's messages",
)
