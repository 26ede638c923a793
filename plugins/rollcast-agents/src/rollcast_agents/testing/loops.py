"""The conformance suite of agent loops."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from rollcast.errors import SessionEnded
from rollcast_agents.contracts.agent_loop import AgentLoopSetup, BaseAgentLoop, Outcome, agent_loops
from rollcast_agents.contracts.environment import BaseEnvironment
from rollcast_agents.contracts.renderer import Message
from rollcast_agents.contracts.trajectory import ENDS
from rollcast_agents.testing.scripted import ScriptedSession
from rollcast_agents.tools.box import ToolBox

__all__ = ["AgentLoopSuite"]


class AgentLoopSuite:
    """Checks for loops that sample through their session; subclass it, and set the loop's name and tasks.

    Attributes:
        name: registry name of the loop in ``rollcast.agent_loops``.
        config: its ``agent`` section.
        tasks: rows of the dataset.
        replies: scripts of the model: lists of texts, or of messages with tool calls.
        make_environment: returns a new environment; None for loops without one.
        tools: tools of the run.
    """

    name: ClassVar[str] = ""
    config: ClassVar[Any] = None
    tasks: ClassVar[Sequence[Mapping[str, Any]]] = ({"prompt": [{"role": "user", "content": "2+2?"}]},)
    replies: ClassVar[Sequence[Sequence[str | Message]]] = (
        ("four",),
        ("", "", ""),
        (ScriptedSession.call("nothing", a=1), "ok"),
    )
    make_environment: ClassVar[Callable[[], BaseEnvironment] | None] = None
    tools: ClassVar[Sequence[Any]] = ()

    @pytest.fixture
    def loop(self) -> BaseAgentLoop:
        """Return the loop under test."""
        return agent_loops.get(self.name)(AgentLoopSetup(self.config, ToolBox(self.tools)))

    async def _run(self, loop: BaseAgentLoop, task: Mapping[str, Any], session: ScriptedSession) -> Outcome | None:
        make = type(self).make_environment
        environment = make() if make is not None else None
        try:
            return await loop.run(task, session, environment)
        except SessionEnded:
            return None
        finally:
            if environment is not None:
                await environment.close()

    def test_every_script_comes_to_an_end(self, loop: BaseAgentLoop) -> None:
        """Check that a rollout ends with an outcome or its session's end, and that rewards are finite."""
        for task in self.tasks:
            for script in self.replies:
                session = ScriptedSession(script, max_turns=8)
                outcome = asyncio.run(self._run(loop, task, session))
                assert session.turns <= 8
                if outcome is None:
                    assert session.end is not None
                    continue
                assert outcome.end in ENDS
                assert outcome.reward is None or math.isfinite(outcome.reward)
                assert all(0 <= turn < session.turns for turn in outcome.turn_rewards)

    def test_it_samples(self, loop: BaseAgentLoop) -> None:
        """Check that a rollout samples at least once."""
        for task in self.tasks:
            session = ScriptedSession(self.replies[0])
            asyncio.run(self._run(loop, task, session))
            assert session.turns

    def test_rollouts_run_at_once(self, loop: BaseAgentLoop) -> None:
        """Check that one loop serves many concurrent rollouts without mixing their conversations."""
        task = self.tasks[0]

        async def run() -> list[ScriptedSession]:
            sessions = [ScriptedSession([f"reply {number}"]) for number in range(16)]
            await asyncio.gather(*(self._run(loop, task, session) for session in sessions))
            return sessions

        sessions = asyncio.run(run())
        alone = ScriptedSession(["reply 3"])
        asyncio.run(self._run(loop, task, alone))
        assert repr(sessions[3].prompts) == repr(alone.prompts)

    def test_the_task_is_left_alone(self, loop: BaseAgentLoop) -> None:
        """Check that a rollout does not modify its task, which others share."""
        for task in self.tasks:
            before = repr(task)
            asyncio.run(self._run(loop, task, ScriptedSession(self.replies[0])))
            assert repr(task) == before
