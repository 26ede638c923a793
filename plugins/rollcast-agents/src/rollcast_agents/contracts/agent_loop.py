"""Contract of agent loops: the code between a task and its trajectories.

A loop samples only through its session, so every token under the loss was sampled by the policy::

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
    from rollcast_agents.contracts.environment import BaseEnvironment
    from rollcast_agents.contracts.session import Session
    from rollcast_agents.contracts.trajectory import End

__all__ = ["AgentLoopSetup", "BaseAgentLoop", "Outcome", "agent_loops"]


@dataclass(frozen=True)
class Outcome:
    """The result of a rollout as its agent loop reports it; the tokens are recorded by the session.

    Attributes:
        end: reason why the rollout ended.
        reward: score of the whole rollout; None to use the reward function's score plus the turn rewards.
        turn_rewards: turn → reward of its reply; included in the whole score.
        reward_components: named parts of the reward.
        messages: conversation at the end, for rewards and reports.
        metrics: metrics of the rollout.
        extra: further data for the reward function.
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
    """Constructor arguments of an agent loop.

    Attributes:
        config: ``agent`` section of the config.
        tools: tools of the run, ready to call; a ``rollcast_agents.ToolBox``.
        gateway: HTTP endpoint of the run for external programs, a ``rollcast_agents.Gateway``; None without one.
    """

    config: Any
    tools: Any = None
    gateway: Any = None


class BaseAgentLoop(ABC):
    """Base class of agent loops, which run rollouts.

    One instance per process serves many rollouts at once, so keep the state of a rollout inside :meth:`run`.
    """

    def __init__(self, setup: AgentLoopSetup) -> None:
        self.setup = setup

    @abstractmethod
    async def run(self, task: Mapping[str, Any], session: Session, environment: BaseEnvironment | None) -> Outcome:
        """Run one rollout.

        Args:
            task: row of the dataset; ``prompt`` is its conversation in OpenAI's chat format.
            session: samples replies and records their tokens.
            environment: environment of this rollout; None if the run has no environments.

        Raises:
            SessionEnded: the session cannot sample further. The loop may let this error propagate; the trajectories
                recorded so far then count, with the error's ``end``.
        """

    async def close(self) -> None:
        """Release the loop's resources; called once, when the process ends."""
        return


agent_loops: Registry[type[BaseAgentLoop]] = Registry(
    "rollcast.agent_loops", subclass_of(BaseAgentLoop), "agent.loop", description="code between tasks and trajectories"
)
