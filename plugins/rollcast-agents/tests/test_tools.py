"""Tools: schemas, checks of arguments, limits, state."""

from __future__ import annotations

import asyncio

import pytest

from rollcast.errors import ConfigError
from rollcast_agents.contracts.tool import BaseTool, ToolResult
from rollcast_agents.tools.box import ToolBox, ToolLimits
from rollcast_agents.tools.functions import FunctionTool
from rollcast_data.chat_template import ToolCall


def weather(city: str, days: int = 1) -> str:
    """Return the forecast of a city.

    Args:
        city: Name of the
            city.
        days: Number of days.
    """
    return f"{city}: {days} days of sun"


class Notes(BaseTool):
    """Keeps what a rollout wrote."""

    released: list[list[str]]

    def __init__(self):
        self.opened, self.released = 0, []

    @property
    def schema(self):
        return {"type": "function", "function": {"name": "note", "parameters": {"type": "object", "properties": {}}}}

    async def open(self, task):
        self.opened += 1
        await asyncio.sleep(0)
        return [task["name"]]

    async def call(self, state, arguments):
        state.append(arguments["text"])
        return ToolResult(str(len(state)), reward=0.5)

    async def release(self, state):
        self.released.append(state)


def call(box: ToolBox, *calls: ToolCall, task=None):
    async def run():
        async with box.rollout(task or {"name": "t"}) as tools:
            return await asyncio.gather(*(tools.call(each) for each in calls)), tools

    return asyncio.run(run())


def test_a_function_is_described_by_its_hints_and_docstring():
    schema = FunctionTool(weather).schema["function"]
    assert schema["description"] == "Return the forecast of a city."
    assert schema["parameters"]["properties"]["city"] == {"type": "string", "description": "Name of the city."}
    assert schema["parameters"]["properties"]["days"]["default"] == 1
    assert schema["parameters"]["required"] == ["city"]


def test_a_function_whose_arguments_no_model_can_write_is_refused():
    def odd(lock: asyncio.Lock) -> str:
        return ""

    with pytest.raises(ConfigError, match="odd"):
        FunctionTool(odd)


def test_arguments_are_converted_or_refused_with_their_names():
    box = ToolBox([FunctionTool(weather)])
    (good, bad, missing), _ = call(
        box,
        ToolCall("weather", {"city": 7, "days": "3"}),
        ToolCall("weather", {"city": "Rome", "days": "many"}),
        ToolCall("weather", {}),
    )
    assert good.text == "7: 3 days of sun"
    assert bad.is_error and "days" in bad.text
    assert missing.is_error and "city" in missing.text


def test_unknown_malformed_raising_and_slow_calls_are_answered_as_text():
    async def sleepy() -> str:
        await asyncio.Event().wait()
        return ""

    def broken() -> str:
        raise KeyError("inside")

    box = ToolBox([FunctionTool(sleepy), FunctionTool(broken)], ToolLimits(timeout_s=0.05))
    results, tools = call(
        box, ToolCall("sleepy"), ToolCall("broken"), ToolCall("nothing"), ToolCall("", error="no JSON")
    )
    slow, broke, unknown, malformed = results
    assert all(result.is_error for result in results)
    assert "0.05 s" in slow.text
    assert "KeyError" in broke.text
    assert "sleepy, broken" in unknown.text
    assert malformed.text == "no JSON"
    each = {"tool/broken/calls": 1, "tool/sleepy/calls": 1, "tool/unknown/calls": 2}
    assert tools.counts == {"tool_calls": 4, "tool_errors": 4, **each}


def test_state_lives_as_long_as_the_rollout_and_is_opened_once():
    notes = Notes()
    results, _ = call(ToolBox([notes]), ToolCall("note", {"text": "a"}), ToolCall("note", {"text": "b"}))
    assert sorted(result.text for result in results) == ["2", "3"]
    assert notes.opened == 1
    assert [sorted(state) for state in notes.released] == [["a", "b", "t"]]


def test_state_is_released_when_the_rollout_is_cancelled():
    notes = Notes()

    async def run():
        began = asyncio.Event()

        async def rollout():
            async with ToolBox([notes]).rollout({"name": "t"}) as tools:
                await tools.call(ToolCall("note", {"text": "a"}))
                began.set()
                await asyncio.Event().wait()

        task = asyncio.ensure_future(rollout())
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert notes.released == [["t", "a"]]


def test_at_most_so_many_calls_run_at_once():
    running, most = 0, 0

    async def work() -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return ""

    box = ToolBox([FunctionTool(work)], ToolLimits(max_concurrency=2))
    call(box, *[ToolCall("work")] * 8)
    assert most == 2


def test_a_long_result_loses_its_middle():
    def long() -> str:
        return "a" * 500 + "z" * 500

    ((result,), _) = call(ToolBox([FunctionTool(long)], ToolLimits(max_length=100)), ToolCall("long"))
    assert len(result.text) <= 110
    assert result.text.startswith("a") and result.text.endswith("z")


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="weather"):
        ToolBox([FunctionTool(weather), FunctionTool(weather)])


def test_the_state_of_an_added_tool_is_released_too(caplog):
    class Held(FunctionTool):
        released = 0

        async def release(self, state):
            self.released += 1

    held = Held(weather)

    async def run():
        async with ToolBox().rollout({}) as tools:
            await tools.with_tools({"weather": held}).call(ToolCall("weather", {"city": "Rome"}))

    asyncio.run(run())
    assert held.released == 1
    assert not caplog.records
