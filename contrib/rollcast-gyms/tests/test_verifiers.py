"""Tasksets of the package verifiers. Run by the session ``tests_verifiers``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from rollcast.errors import ConfigError, PluginError
from rollcast_agents.commands import validate_app
from rollcast_agents.contracts.environment import Observation
from rollcast_agents.contracts.renderer import Message
from rollcast_agents.testing import EnvironmentSuite
from rollcast_data.chat_template import ToolCall
from rollcast_gyms.verifiers import Verifiers

pytest.importorskip("verifiers.v1")

TASKSET = '''
import asyncio
import itertools

import verifiers.v1 as vf

__all__ = ["Sums"]


class Data(vf.TaskData):
    answer: str


class Memory(vf.State):
    calls: int = 0


class Calculator(vf.Toolset[vf.ToolsetConfig, Memory]):
    async def setup_task(self, task):
        self.offset = int(task.answer)

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        self.state.calls += 1
        return a + b

    @vf.tool(name="peek")
    async def look(self) -> str:
        """Say the answer."""
        await asyncio.sleep(0)
        self.state.calls += 1
        return str(self.offset)


class Sum(vf.Task[Data, Memory, vf.TaskConfig]):
    async def setup(self, trace, runtime):
        await runtime.write("answer", self.data.answer.encode())

    @vf.stop
    def patient(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 3

    @vf.stop
    def asked_too_much(self, request: vf.Request) -> bool:
        return any("STOP" in (message.content or "") for message in request.messages)

    @vf.reward(weight=2.0)
    async def right(self, trace, runtime) -> float:
        return float(trace.last_reply == (await runtime.read("answer")).decode())

    @vf.metric
    async def used(self, trace) -> float:
        return float(trace.state.calls)

    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.ToolsetConfig())]


class Config(vf.TasksetConfig):
    start: int = 0


class Sums(vf.Taskset[Sum, Config]):
    INFINITE = True

    def load(self):
        for number in itertools.count(self.config.start):
            yield Sum(
                Data(prompt=f"{number}+{number}=", system_prompt="Add.", answer=str(2 * number)), self.config.task
            )


class Bare(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)


class Three(vf.Taskset[Bare, vf.TasksetConfig]):
    def load(self):
        for number in range(3):
            prompt = [vf.UserMessage(content=str(number)), vf.AssistantMessage(content="?"), vf.UserMessage(content="!")]
            yield Bare(Data(prompt=prompt, answer=str(number)))


class Boxed(Bare):
    NEEDS_CONTAINER = True


class NeedsContainer(vf.Taskset[Boxed, vf.TasksetConfig]):
    def load(self):
        return []


class Rewriting(Bare):
    @vf.intercept
    def shorten(self, response: vf.Response) -> vf.Response:
        return response


class Rewrites(vf.Taskset[Rewriting, vf.TasksetConfig]):
    def load(self):
        return []
'''


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The module ``sums_taskset``, as an installed package."""
    folder = tmp_path_factory.mktemp("tasksets")
    (folder / "sums_taskset.py").write_text(TASKSET)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        # Folders of runtimes.
        patch.setattr("verifiers.v1.runtimes.subprocess.CACHE_DIR", folder)
        yield folder


def call(name: str, **arguments: Any) -> Message:
    return Message("", tool_calls=(ToolCall(name, arguments, "call_0"),))


def play(environment: Verifiers, task: dict[str, Any], *replies: Message) -> list[Observation]:
    async def run() -> list[Observation]:
        try:
            return [await environment.reset(task), *[await environment.step(reply) for reply in replies]]
        finally:
            await environment.close()

    return asyncio.run(run())


class TestVerifiers(EnvironmentSuite):
    name = "verifiers"
    options: ClassVar = {"taskset": "sums_taskset", "options": {"start": 1}}
    tasks: ClassVar = [{"prompt": [], "index": 3}, {"prompt": [], "index": 0}]
    replies: ClassVar = ("", "8", "\ufffd", "#" * 10_000)


def test_tools_are_called_and_the_answer_is_scored(module: Path) -> None:
    replies = [call("calculator_add", a=2, b="2"), call("calculator_peek"), Message("4")]
    start, first, second, end = play(Verifiers("sums_taskset"), {"index": 2}, *replies)
    assert [(each["role"], each["content"]) for each in start.messages] == [("system", "Add."), ("user", "2+2=")]
    assert [each["function"]["name"] for each in start.tools] == ["calculator_add", "calculator_peek"]
    assert start.tools[0]["function"]["description"] == "Add two numbers."
    assert set(start.tools[0]["function"]["parameters"]["properties"]) == {"a", "b"}
    for seen in (first, second):
        assert [(each["role"], each["content"]) for each in seen.messages] == [("tool", "4")]
        assert (seen.reward, seen.done) == (0.0, False)
    assert (end.reward, end.done, end.components, end.metrics) == (2.0, True, {"right": 2.0}, {"used": 2.0})
    assert not list((module / "runtimes" / "subprocess").iterdir())  # every episode has removed its folder


def test_wrong_calls_are_answered_and_a_stop_ends_the_episode() -> None:
    bad = Message("", tool_calls=(ToolCall("", error="not JSON"),))
    wrong = call("calculator_add", a="many", b=1)
    _, first, second, third = play(Verifiers("sums_taskset"), {"index": 2}, bad, wrong, call("nothing"))
    assert first.messages[0]["content"] == "not JSON"
    assert "do not fit" in second.messages[0]["content"]
    assert (third.done, third.reward) == (True, 0.0)  # the third turn is one too many
    *_, stopped = play(Verifiers("sums_taskset"), {"index": 2}, Message("STOP", tool_calls=wrong.tool_calls))
    assert stopped.done


def test_a_row_may_have_a_system_message_of_its_own() -> None:
    task = {"index": 1, "prompt": [{"role": "system", "content": "Be brief."}]}
    (start,) = play(Verifiers("sums_taskset"), task)
    assert [each["role"] for each in start.messages] == ["user"]


def test_a_class_is_named_and_its_tasks_begin_again() -> None:
    start, end = play(Verifiers("sums_taskset:Three"), {"index": 4}, Message("1"))
    assert [each["content"] for each in start.messages] == ["1", "?", "!"]
    assert (start.tools, end.reward, end.done) == (None, 1.0, True)


def test_a_taskset_is_validated(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "Add.", "index": {n}, "ground_truth": "{2 * n}"}}\n' for n in range(3)))
    options = ["agent.environment=verifiers", "agent.environment_kwargs.taskset=sums_taskset"]
    result = CliRunner().invoke(validate_app, [str(path), *options], catch_exceptions=False)
    assert result.stdout == "3 rows checked with environment verifiers, 0 faults\n"


@pytest.mark.parametrize(
    ("taskset", "options", "words"),
    [
        ("", {}, r"agent\.environment_kwargs\.taskset"),
        ("no_such_taskset", {}, "no_such_taskset"),
        ("sums_taskset:Nothing", {}, "Nothing"),
        ("sums_taskset", {"strat": 3}, r"options do not fit the taskset sums_taskset: strat"),
        ("sums_taskset:NeedsContainer", {}, "need a container; run it with agent.loop=program"),
        ("sums_taskset:Rewrites", {}, r"rewrite messages \(shorten\)"),
        ("textarena", {"game": "Hangman-v0"}, "textarena"),
    ],
)
def test_what_cannot_be_played_is_named(taskset: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, PluginError), match=words):
        play(Verifiers(taskset, options), {"index": 0})
