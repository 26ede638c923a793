"""The loops, renderers and wrappers of this distribution pass their suites; broken plugins do not."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import ClassVar

import pytest
from agent_tools import FORGETFUL, write_tokenizer

from rollcast_agents.contracts.environment import BaseEnvironment, Observation
from rollcast_agents.environments.plain import PlainEnvironment
from rollcast_agents.runner import GuardedEnvironment, Limits
from rollcast_agents.testing import AgentLoopSuite, EnvironmentSuite, RendererSuite, ScriptedSession, ToolSuite
from rollcast_agents.tools.functions import FunctionTool
from rollcast_testing import CommandSuite


class Guess:
    """Guess the number."""

    def reset(self, number: int, **task) -> str:
        self.number = number
        return "Guess my number."

    def higher(self, than: int) -> bool:
        """Return True if the number is higher."""
        return self.number > than

    def get_reward(self) -> float:
        return 0.5


def repeat(text: str, times: int = 2) -> str:
    """Repeat a text."""
    return text * times


class TestChatTemplate(RendererSuite):
    name = "chat_template"
    always_extends = True

    @pytest.fixture(scope="class")
    @classmethod
    def model_path(cls, tmp_path_factory):
        return write_tokenizer(tmp_path_factory.mktemp("model"))


class TestForgetfulTemplate(RendererSuite):
    name = "chat_template"
    replies: ClassVar = ("four", "<think>2 and 2</think>four")

    @pytest.fixture(scope="class")
    @classmethod
    def model_path(cls, tmp_path_factory):
        return write_tokenizer(tmp_path_factory.mktemp("model"), FORGETFUL)


class TestFunctionTool(ToolSuite):
    cases: ClassVar = [({"text": "ab"}, "abab"), ({"text": "c", "times": "3"}, "ccc")]
    bad: ClassVar = ({}, {"text": "a", "times": "often"})

    @pytest.fixture
    def tool(self):
        return FunctionTool(repeat)


class TestPlainEnvironment(EnvironmentSuite):
    tasks: ClassVar = [{"prompt": [], "number": 7}]

    def build(self):
        return PlainEnvironment(Guess())


class TestSingleTurn(AgentLoopSuite):
    name = "single_turn"


class TestTool(AgentLoopSuite):
    name = "tool"
    config: ClassVar = SimpleNamespace(max_parallel_calls=4)
    tools: ClassVar = [FunctionTool(repeat)]
    replies: ClassVar = (
        ("four",),
        (ScriptedSession.call("repeat", text="a"), "aa"),
        (ScriptedSession.call("nothing"),),
    )


class TestEnvironment(AgentLoopSuite):
    name = "environment"
    config: ClassVar = SimpleNamespace(max_parallel_calls=4)
    tasks: ClassVar = [{"prompt": [], "number": 7}]
    replies: ClassVar = (("seven",), (ScriptedSession.call("higher", than=3), "seven"))
    make_environment = staticmethod(lambda: GuardedEnvironment(PlainEnvironment(Guess()), Limits()))


class Moody(BaseEnvironment):
    async def reset(self, task):
        return Observation([{"role": "user", "content": str(time.time_ns())}])

    async def step(self, message):
        return Observation(reward=float("nan"))


class Moods(EnvironmentSuite):
    tasks: ClassVar = [{"prompt": []}]

    def build(self):
        return Moody()


@pytest.mark.parametrize(
    "check", [Moods().test_a_reset_is_deterministic, lambda: Moods().test_any_reply_is_answered(1)]
)
def test_a_bad_environment_fails_its_suite(check):
    with pytest.raises(AssertionError):
        check()


class TestReplayTrajectoriesCommand(CommandSuite):
    name = "replay-trajectories"


class TestValidateTaskCommand(CommandSuite):
    name = "validate-task"
