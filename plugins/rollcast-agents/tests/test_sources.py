"""Tools and worlds of others: MCP servers, verl's tools, the sandbox."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest

from rollcast.errors import ConfigError
from rollcast_agents.testing import ToolSuite
from rollcast_agents.tools.box import ToolBox, ToolLimits
from rollcast_agents.tools.mcp import McpServer
from rollcast_agents.tools.verl import load_tool_config
from rollcast_data.chat_template import ToolCall

SERVER = """
from mcp.server.mcpserver import MCPServer

server = MCPServer("numbers")

@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

@server.tool()
def fail() -> str:
    "Fail."
    raise RuntimeError("no luck")

server.run()
"""


class TestPython(ToolSuite):
    name = "python"
    cases: ClassVar = [({"code": "print(6 * 7)"}, "42"), ({"code": ""}, "")]
    bad: ClassVar = ({}, {"code": 1}, {"code": "1 / 0"}, {"code": "a b"})


@pytest.fixture
def server(tmp_path):
    pytest.importorskip("mcp")
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    return {"command": sys.executable, "args": [str(script)]}


def test_an_mcp_server_gives_its_tools(server):
    async def run():
        connection = McpServer("numbers", server, timeout_s=120)
        tools = await connection.start()
        async with ToolBox(tools, ToolLimits(timeout_s=60)).rollout({}) as box:
            calls = [ToolCall("add", {"a": 2, "b": 3}), ToolCall("fail"), ToolCall("add", {"a": "x"})]
            results = [await box.call(call) for call in calls]
        await connection.close()
        return tools, results, await connection.call("add", {})

    tools, (good, failed, wrong), ended = asyncio.run(run())
    assert [tool.schema["function"]["name"] for tool in tools] == ["add", "fail"]
    assert tools[0].schema["function"]["parameters"]["required"] == ["a", "b"]
    assert (good.text, good.is_error) == ("5", False)
    assert failed.is_error and "fail" in failed.text
    assert wrong.is_error
    assert ended.is_error


@pytest.mark.parametrize("options", [{}, {"url": "http://x", "command": "y"}, {"command": "y", "argz": []}])
def test_options_that_name_no_server_are_refused(options):
    with pytest.raises(ConfigError, match=r"agent\.mcp_servers\.numbers"):
        asyncio.run(_start(options))


async def _start(options):
    await McpServer("numbers", options, timeout_s=60).start()


def test_a_server_that_cannot_be_started_is_named():
    pytest.importorskip("mcp")
    with pytest.raises(ConfigError, match=r"agent\.mcp_servers\.numbers"):
        asyncio.run(_start({"command": "/no/such/command"}))


class OldTool:
    """As verl's users write them."""

    released: ClassVar = []

    def __init__(self, config, tool_schema):
        self.config, self.sums = config, {}

    async def create(self, instance_id=None, start=0, **kwargs):
        self.sums[instance_id] = start
        return instance_id, None

    async def execute(self, instance_id, parameters, **kwargs):
        self.sums[instance_id] += parameters["number"] * self.config["factor"]
        return SimpleNamespace(text=str(self.sums[instance_id])), 0.5, {"sum": self.sums[instance_id]}

    async def release(self, instance_id, **kwargs):
        self.released.append(instance_id)


CONFIG = """
tools:
  - class_name: old_tools.OldTool
    config: {factor: 2}
    tool_schema:
      type: function
      function: {name: total, description: Add up., parameters: {type: object, properties: {number: {type: integer}}}}
"""


def test_verls_tools_and_their_file_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "old_tools", SimpleNamespace(OldTool=OldTool))
    path = tmp_path / "tools.yaml"
    path.write_text(CONFIG)
    (tool,) = load_tool_config(path)
    task = {"extra_info": {"tools_kwargs": {"total": {"create_kwargs": {"start": 10}}}}}

    async def run():
        async with ToolBox([tool]).rollout(task) as box:
            return [await box.call(ToolCall("total", {"number": number})) for number in (1, 2)]

    first, second = asyncio.run(run())
    assert (first.text, second.text, second.reward, second.metrics) == ("12", "16", 0.5, {"sum": 16.0})
    assert len(OldTool.released) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tools: 3", "no list"),
        ("tools: [{}]", r"tools\[0\]"),
        ("tools: [{class_name: no_such_module.Tool}]", "no_such_module"),
        (": [", "cannot be read"),
    ],
)
def test_a_bad_tool_file_is_named(tmp_path, text, words):
    path = tmp_path / "tools.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_tool_config(path)
