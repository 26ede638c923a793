"""The conformance suite of environments."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest

from rollcast.contracts.environment import BaseEnvironment, Observation
from rollcast.contracts.renderer import Message
from rollcast_agents.environments.plain import build_environment

__all__ = ["EnvironmentSuite"]


class EnvironmentSuite:
    """Checks of every environment; subclass it, and name the environment and some tasks.

    Attributes:
        name: the environment, as it is announced in ``rollcast.environments``.
        options: its ``agent.environment_kwargs``.
        tasks: rows of the dataset.
        replies: what a model may say, well-formed or not.
    """

    name: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    tasks: ClassVar[Sequence[Mapping[str, Any]]] = ()
    replies: ClassVar[Sequence[str]] = ("", "yes", "\ufffd", "#" * 10_000)

    def build(self) -> BaseEnvironment:
        """Return a new environment; override it for one that is not announced."""
        return build_environment(self.name, self.options)

    def _play(self, task: Mapping[str, Any], replies: Sequence[str]) -> list[Observation]:
        async def run() -> list[Observation]:
            environment = self.build()
            try:
                seen = [await environment.reset(task)]
                for reply in replies:
                    if seen[-1].done:
                        break
                    seen.append(await environment.step(Message(reply)))
                return seen
            finally:
                await environment.close()

        return asyncio.run(run())

    def test_suite_is_filled_in(self) -> None:
        """There is something to test."""
        assert self.tasks, f"{type(self).__name__}.tasks has to hold rows of a dataset"

    def test_an_episode_begins_with_a_prompt(self) -> None:
        """Reset gives messages, unless the task has a prompt; they and the tools are JSON."""
        for task in self.tasks:
            (seen,) = self._play(task, ())
            assert seen.messages or task.get("prompt"), "neither the task nor the environment has a prompt"
            json.dumps([list(seen.messages), list(seen.tools or ())])
            assert all("role" in message and "content" in message for message in seen.messages)

    def test_a_reset_is_deterministic(self) -> None:
        """The same task begins the same episode, in this environment and in another."""
        for task in self.tasks:
            first, second = self._play(task, ()), self._play(task, ())
            assert list(first[0].messages) == list(second[0].messages)

    @pytest.mark.parametrize("times", [1, 3])
    def test_any_reply_is_answered(self, times: int) -> None:
        """Whatever a model says is answered by an observation with a finite reward."""
        for task in self.tasks:
            for reply in self.replies:
                for seen in self._play(task, [reply] * times):
                    assert isinstance(seen, Observation)
                    assert seen.reward is None or math.isfinite(seen.reward)

    def test_the_same_replies_have_the_same_rewards(self) -> None:
        """An episode depends on its task and the replies alone."""
        for task in self.tasks:
            first, second = (self._play(task, self.replies) for _ in range(2))
            assert [seen.reward for seen in first] == [seen.reward for seen in second]

    def test_closing_needs_no_reset(self) -> None:
        """An environment that was never begun can be closed."""
        asyncio.run(self.build().close())
