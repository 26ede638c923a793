"""Contract of tools: functions that a model may call during a rollout.

A plain function is a tool: its name, type hints and docstring are the schema that the model sees::

    def weather(city: str, days: int = 1) -> str:
        \"\"\"Return the forecast of a city.

Args:
            city: Name of the city.
            days: Number of days.
        \"\"\"

Announce it in the group ``rollcast.tools``; the config names it in ``agent.tools``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from rollcast.plugins import Registry, any_of, is_callable, subclass_of

if TYPE_CHECKING:
    from rollcast.contracts.renderer import ToolSchema

__all__ = ["BaseTool", "ToolResult", "tools"]


@dataclass(frozen=True)
class ToolResult:
    """Result of a call.

    Attributes:
        text: text that the model sees.
        reward: added to the reward of the turn that made the call.
        metrics: numbers, averaged as ``tool/<name>/<metric>``.
        is_error: True if the call failed; the text says why.
    """

    text: str
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_error: bool = False


class BaseTool(ABC):
    """A tool with state or settings; built once per process, with ``agent.tools.<name>`` as keyword arguments.

    State of one rollout lives in the object that :meth:`open` returns; it exists until :meth:`release`.
    """

    #: Calls that may run at once in one process; None for any number.
    max_concurrency: ClassVar[int | None] = None

    @property
    @abstractmethod
    def schema(self) -> ToolSchema:
        """The tool as the model sees it, in OpenAI's format."""

    async def open(self, task: Mapping[str, Any]) -> Any:
        """Return the state of one rollout, made before its first call.

        Args:
            task: row of the dataset.
        """
        return None

    @abstractmethod
    async def call(self, state: Any, arguments: Mapping[str, Any]) -> ToolResult | str:
        """Run one call; an exception becomes a result that the model sees."""

    async def release(self, state: Any) -> None:
        """Free the state of one rollout; called once for each :meth:`open`, also when the rollout is interrupted."""
        return

    async def close(self) -> None:
        """Free what the tool holds; called once at the end of the process."""
        return


tools: Registry[Any] = Registry(
    "rollcast.tools",
    any_of(subclass_of(BaseTool), is_callable()),
    "agent.tools",
    description="functions that a model may call",
)
