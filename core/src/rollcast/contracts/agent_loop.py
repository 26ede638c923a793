"""Contract of agent loops: the code between a task and its trajectories.

A loop samples through its session alone, so it cannot put a token under the loss that the policy did not sample::

    class Twice(BaseAgentLoop):
        async def run(self, task, session, environment):
            first = await session.sample(task["prompt"])
            again = [*task["prompt"], as_chat(first.message), {"role": "user", "content": "Are you sure?"}]
            await session.sample(again)
            return Outcome()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollcast.plugins import Registry, subclass_of

if TYPE_CHECKING:
    from rollcast.contracts.environment import BaseEnvironment
    from rollcast.contracts.session import Session
    from rollcast.contracts.trajectory import End

__all__ = ["AgentLoopSetup", "BaseAgentLoop", "Outcome", "agent_loops"]


@dataclass(frozen=True)
class Outcome:
    """What a loop knows at the end of a rollout; the tokens are in its session.

    Attributes:
        end: reason why it ended.
        reward: score of the whole rollout; None leaves it to the reward function, whose score is added to the turns'.
        turn_rewards: turn → reward of its reply; part of the whole.
        reward_components: named parts of the reward.
        messages: conversation at the end, for rewards and reports.
        metrics: numbers of the rollout.
        extra: further data for the reward.
    """

    end: End = "done"
    reward: float | None = None
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    reward_components: Mapping[str, float] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AgentLoopSetup:
    """Arguments that a loop is built from.

    Attributes:
        config: config's ``agent`` section.
        tools: tools of the run, ready to call: a ``rollcast_agents.ToolBox``.
        gateway: endpoint of the run for programs: a ``rollcast_agents.Gateway``; None if it has none.
    """

    config: Any
    tools: Any = None
    gateway: Any = None


class BaseAgentLoop(ABC):
    """Runs rollouts; one instance a process serves many rollouts at once, so state belongs in :meth:`run`."""

    def __init__(self, setup: AgentLoopSetup) -> None:
        self.setup = setup

    @abstractmethod
    async def run(self, task: Mapping[str, Any], session: Session, environment: BaseEnvironment | None) -> Outcome:
        """Run one rollout.

        Args:
            task: row of the dataset; ``prompt`` is its conversation in OpenAI's chat format.
            session: samples and records.
            environment: of this rollout; None if the run has none.

        Raises:
            SessionEnded: may be left to the caller; the trajectories so far count, with its ``end``.
        """

    async def close(self) -> None:
        """Free what the loop holds; called once at the end of the process."""
        return


agent_loops: Registry[type[BaseAgentLoop]] = Registry(
    "rollcast.agent_loops", subclass_of(BaseAgentLoop), "agent.loop", description="code between tasks and trajectories"
)
