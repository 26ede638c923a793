"""The loops ``single_turn``, ``tool`` and ``environment``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollcast.contracts.reward import finite_number
from rollcast.errors import ConfigError, SessionEnded
from rollcast_agents.chat import as_chat, tool_message
from rollcast_agents.contracts.agent_loop import AgentLoopSetup, BaseAgentLoop, Outcome
from rollcast_agents.contracts.environment import BaseEnvironment, Observation
from rollcast_agents.contracts.renderer import Message
from rollcast_agents.contracts.session import Session
from rollcast_agents.contracts.trajectory import End
from rollcast_agents.runner import GuardedEnvironment
from rollcast_agents.tools.box import RolloutTools, ToolBox
from rollcast_data.chat_template import ChatMessage, ToolSchema

__all__ = ["EnvironmentLoop", "SingleTurnLoop", "ToolLoop"]


class SingleTurnLoop(BaseAgentLoop):
    """A loop with one reply to the task's prompt, which shows the tools of the dataset's column ``tools``."""

    async def run(self, task: Mapping[str, Any], session: Session, environment: BaseEnvironment | None) -> Outcome:
        prompt = list(task["prompt"])
        reply = await session.sample(prompt, _own_tools(task))
        return Outcome(reply.end or "done", messages=[*prompt, as_chat(reply.message)])


class _Episode:
    """The conversation of one rollout, and its rewards and metrics so far."""

    def __init__(self, messages: Sequence[ChatMessage]) -> None:
        self.messages: list[ChatMessage] = list(messages)
        self.turn_rewards: dict[int, float] = {}
        self.components: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self.end: End = "done"
        self._is_scored = False

    def reward(self, turn: int, value: float | None) -> None:
        if value is not None:
            self.turn_rewards[turn] = _sum([self.turn_rewards.get(turn, 0.0), value])

    def observe(self, turn: int, seen: Observation) -> None:
        self.messages += seen.messages
        self.reward(turn, seen.reward)
        self._is_scored |= seen.reward is not None
        for name, value in seen.components.items():
            self.components[name] = _sum([self.components.get(name, 0.0), value])
        self.metrics |= seen.metrics

    async def reply(self, session: Session, tools: Sequence[ToolSchema]) -> Message | None:
        """Return the model's next message; None if the session's budget is spent."""
        try:
            reply = await session.sample(self.messages, tools)
        except SessionEnded as ended:
            self.end = ended.end  # type: ignore[assignment]  # one of ENDS
            return None
        self.messages.append(as_chat(reply.message))
        if reply.end is not None:
            self.end = reply.end
        return reply.message

    async def answer(self, session: Session, message: Message, tools: RolloutTools, at_once: int) -> None:
        """Run the first ``at_once`` of the message's calls concurrently, and add their results in call order."""
        calls = message.tool_calls[:at_once]
        results = await asyncio.gather(*(tools.call(call) for call in calls))
        for call, result in zip(calls, results, strict=True):
            self.messages.append(tool_message(call, result.text))
            # A tool's usual 0 gives no turn a reward.
            self.reward(session.turns - 1, None if _sum([result.reward]) == 0.0 else result.reward)
            for name, value in result.metrics.items():
                self.metrics[f"tool/{call.name}/{name}"] = value
        for call in message.tool_calls[at_once:]:
            self.messages.append(tool_message(call, f"Not run: a reply may have at most {at_once} calls."))

    def numbers(self, tools: RolloutTools) -> dict[str, float]:
        """Return the metrics so far."""
        seconds = {f"tool/{name}/seconds": float(value) for name, value in tools.seconds.items()}
        return {**self.metrics, **{name: float(value) for name, value in tools.counts.items()}, **seconds}

    def outcome(self, tools: RolloutTools) -> Outcome:
        return Outcome(
            self.end,
            # Rewards from tools are added to the reward function's score, unless an environment scores.
            reward=_sum(self.turn_rewards.values()) if self._is_scored else None,
            turn_rewards=self.turn_rewards,
            reward_components=self.components,
            messages=self.messages,
            metrics=self.numbers(tools),
            extra={"tool_failures": list(tools.failures)} if tools.failures else {},
        )


def _sum(values: Iterable[Any]) -> Any:
    """Return the sum of a user's numbers; if one is not a finite number, that value, whose check names it later."""
    total = 0.0
    for value in values:
        try:
            total += finite_number("reward", value)
        except ValueError:
            return value
    return total


class ToolLoop(BaseAgentLoop):
    """A loop of replies and tool calls, until a reply has no call."""

    def __init__(self, setup: AgentLoopSetup) -> None:
        super().__init__(setup)
        self._box = _box_of(setup, "tool")

    async def run(self, task: Mapping[str, Any], session: Session, environment: BaseEnvironment | None) -> Outcome:
        episode = _Episode(task["prompt"])
        async with self._box.rollout(task) as tools:
            session.follow(episode.messages, lambda: episode.numbers(tools))
            offered = _with_schemas(tools.schemas, _own_tools(task))
            while (message := await episode.reply(session, offered)) is not None:
                if episode.end != "done" or not message.tool_calls:
                    break
                await episode.answer(session, message, tools, self.setup.config.max_parallel_calls)
            return episode.outcome(tools)


class EnvironmentLoop(BaseAgentLoop):
    """A loop of replies and the environment's observations, until the environment ends the episode.

    The loop runs calls of the run's tools and of a plain environment's methods; every other reply is passed to the
    environment.
    """

    def __init__(self, setup: AgentLoopSetup) -> None:
        super().__init__(setup)
        self._box = _box_of(setup, "environment")

    async def run(self, task: Mapping[str, Any], session: Session, environment: BaseEnvironment | None) -> Outcome:
        if environment is None:
            raise ConfigError(
                "agent.loop=environment needs agent.environment, the name of an environment, or "
                "agent.interaction_config_path"
            )
        async with self._box.rollout(task) as shared:
            tools = shared
            episode = _Episode(task.get("prompt") or ())
            session.follow(episode.messages, lambda: episode.numbers(shared))
            seen = await environment.reset(task)
            episode.observe(0, seen)
            guarded = environment if isinstance(environment, GuardedEnvironment) else None
            if guarded is not None and guarded.tools is not None:
                tools = tools.with_tools(guarded.tools)
            offered = _offered(tools, seen, _with_schemas(tools.schemas, _own_tools(task)))
            while (message := await episode.reply(session, offered)) is not None and episode.end != "aborted":
                if episode.end == "done" and message.tool_calls and tools.knows(message.tool_calls):
                    await episode.answer(session, message, tools, self.setup.config.max_parallel_calls)
                    if guarded is None or not await guarded.done_early():
                        continue
                # A reply that was cut at its length limit is scored too, as the last one.
                seen = await environment.step(message)
                episode.observe(session.turns - 1, seen)
                offered = _offered(tools, seen, offered)
                if seen.done or episode.end != "done":
                    break
            return episode.outcome(tools)


def _offered(tools: RolloutTools, seen: Observation, before: Sequence[ToolSchema]) -> Sequence[ToolSchema]:
    if seen.tools is None:
        return before or tools.schemas
    return _with_schemas(tools.schemas, seen.tools)


def _with_schemas(schemas: Sequence[ToolSchema], more: Sequence[ToolSchema]) -> Sequence[ToolSchema]:
    """Return the schemas and those of ``more`` with other names."""
    names = {schema["function"]["name"] for schema in schemas}
    return [*schemas, *(schema for schema in more if schema["function"]["name"] not in names)]


def _own_tools(task: Mapping[str, Any]) -> Sequence[ToolSchema]:
    """Return the schemas in the task's column ``tools``; empty if a task uses this name for something else."""
    tools = task.get("tools") or ()
    are_schemas = isinstance(tools, Sequence) and all(
        isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping) for tool in tools
    )
    return list(tools) if are_schemas else ()


def _box_of(setup: AgentLoopSetup, loop: str) -> ToolBox:
    if not isinstance(setup.tools, ToolBox):
        raise ConfigError(f"agent.loop={loop} needs the run's tools")
    return setup.tools
