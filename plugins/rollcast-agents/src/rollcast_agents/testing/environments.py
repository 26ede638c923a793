"""The conformance suite of environments."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest

from rollcast_agents.contracts.environment import BaseEnvironment, Observation
from rollcast_agents.contracts.renderer import Message
from rollcast_agents.environments.plain import build_environment

__all__ = ["EnvironmentSuite"]


class EnvironmentSuite:
    """Checks for environments; subclass it, and set the environment's name and some tasks.

    Attributes:
        name: registry name of the environment in ``rollcast.environments``.
        options: its ``agent.environment_kwargs``.
        tasks: rows of the dataset.
        replies: replies of a model, well-formed or not.
    """

    name: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    tasks: ClassVar[Sequence[Mapping[str, Any]]] = ()
    replies: ClassVar[Sequence[str]] = ("", "yes", "\ufffd", "#" * 10_000)

    def build(self) -> BaseEnvironment:
        """Return a new environment; override it for one that is not registered."""
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
        """Check that there are tasks."""
        assert self.tasks, f"{type(self).__name__}.tasks must contain rows of a dataset"

    def test_an_episode_begins_with_a_prompt(self) -> None:
        """Check that reset returns messages unless the task has a prompt, and that messages and tools are JSON."""
        for task in self.tasks:
            (seen,) = self._play(task, ())
            assert seen.messages or task.get("prompt"), "neither the task nor the environment has a prompt"
            json.dumps([list(seen.messages), list(seen.tools or ())])
            assert all("role" in message and "content" in message for message in seen.messages)

    def test_a_reset_is_deterministic(self) -> None:
        """Check that the same task starts the same episode in two environments."""
        for task in self.tasks:
            first, second = self._play(task, ()), self._play(task, ())
            assert list(first[0].messages) == list(second[0].messages)

    @pytest.mark.parametrize("times", [1, 3])
    def test_any_reply_is_answered(self, times: int) -> None:
        """Check that any reply leads to an observation with a finite reward."""
        for task in self.tasks:
            for reply in self.replies:
                for seen in self._play(task, [reply] * times):
                    assert isinstance(seen, Observation)
                    assert seen.reward is None or math.isfinite(seen.reward)

    def test_the_same_replies_have_the_same_rewards(self) -> None:
        """Check that an episode depends only on its task and the replies."""
        for task in self.tasks:
            first, second = (self._play(task, self.replies) for _ in range(2))
            assert [seen.reward for seen in first] == [seen.reward for seen in second]

    def test_closing_needs_no_reset(self) -> None:
        """Check that an environment can be closed without a reset."""
        asyncio.run(self.build().close())
