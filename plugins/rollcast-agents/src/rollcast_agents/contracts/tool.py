"""Contract of tools, functions that a model may call during a rollout.

A plain function is a tool: its name, type hints and docstring are the schema that the model sees::

    def weather(city: str, days: int = 1) -> str:
        \"\"\"Return the forecast of a city.

Args:
            city: Name of the city.
            days: Number of days.
        \"\"\"

Register it in the entry-point group ``rollcast.tools`` and list it in ``agent.tools``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from rollcast.plugins import Registry, any_of, is_callable, subclass_of

if TYPE_CHECKING:
    from rollcast_data.chat_template import ToolSchema

__all__ = ["BaseTool", "ToolResult", "tools"]


@dataclass(frozen=True)
class ToolResult:
    """The result of a tool call.

    Attributes:
        text: text that the model sees.
        reward: amount added to the reward of the turn that made the call.
        metrics: metrics of the call, averaged as ``tool/<name>/<metric>``.
        is_error: True if the call failed; the text says why.
    """

    text: str
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_error: bool = False


class BaseTool(ABC):
    """Base class of tools with state or settings, built once per process with the keywords ``agent.tools.<name>``.

    Keep the state of a rollout in the object that :meth:`open` returns; it is passed to :meth:`release` at the end.
    """

    #: Largest number of calls that may run at once in one process; None for no limit.
    max_concurrency: ClassVar[int | None] = None

    @property
    @abstractmethod
    def schema(self) -> ToolSchema:
        """Return the tool's schema in OpenAI's format, as shown to the model."""

    async def open(self, task: Mapping[str, Any]) -> Any:
        """Create the state of one rollout, before the rollout's first call.

        Args:
            task: row of the dataset.
        """
        return None

    @abstractmethod
    async def call(self, state: Any, arguments: Mapping[str, Any]) -> ToolResult | str:
        """Run one call; an exception is turned into an error result that the model sees."""

    async def release(self, state: Any) -> None:
        """Release the state of one rollout; called once for each :meth:`open`, also if the rollout is interrupted."""
        return

    async def close(self) -> None:
        """Release the tool's resources; called once, when the process ends."""
        return


tools: Registry[Any] = Registry(
    "rollcast.tools",
    any_of(subclass_of(BaseTool), is_callable()),
    "agent.tools",
    description="functions that a model may call",
)
