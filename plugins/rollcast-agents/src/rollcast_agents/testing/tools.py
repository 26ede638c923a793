"""The conformance suite of tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest

from rollcast_agents.contracts.tool import BaseTool, ToolResult
from rollcast_agents.tools.box import ToolBox, ToolLimits, build_tool
from rollcast_data.chat_template import ToolCall

__all__ = ["ToolSuite"]


class ToolSuite:
    """Checks for tools; subclass it, and set the tool's name and some calls.

    Attributes:
        name: registry name of the tool in ``rollcast.tools``.
        options: its ``agent.tools.<name>``.
        task: row of the dataset that the calls belong to.
        cases: arguments, each with a text that the result must contain.
        bad: arguments that the tool must reject.
    """

    name: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    task: ClassVar[Mapping[str, Any]] = {}
    cases: ClassVar[Sequence[tuple[Mapping[str, Any], str]]] = ()
    bad: ClassVar[Sequence[Mapping[str, Any]]] = ({"no_such_argument": 1},)

    @pytest.fixture
    def tool(self) -> BaseTool:
        """Return the tool under test; override it to build one that is not registered."""
        return build_tool(self.name, self.options)

    def _call(self, tool: BaseTool, *arguments: Mapping[str, Any], at_once: bool = False) -> list[ToolResult]:
        name = tool.schema["function"]["name"]

        async def run() -> list[ToolResult]:
            box = ToolBox([tool], ToolLimits(timeout_s=30))
            async with box.rollout(self.task) as tools:
                calls = [tools.call(ToolCall(name, argument)) for argument in arguments]
                return list(await asyncio.gather(*calls)) if at_once else [await call for call in calls]

        return asyncio.run(run())

    def test_suite_is_filled_in(self) -> None:
        """Check that there are cases."""
        assert self.cases, f"{type(self).__name__}.cases must contain (arguments, text of the result) pairs"

    def test_schema(self, tool: BaseTool) -> None:
        """Check that the schema is JSON with a name, a description and parameters."""
        function = json.loads(json.dumps(tool.schema))["function"]
        assert function["name"]
        assert function["description"], "a model needs a description; write a docstring"
        assert function["parameters"]["type"] == "object"

    def test_cases(self, tool: BaseTool) -> None:
        """Check that each call returns its expected text without an error."""
        for arguments, text in self.cases:
            (result,) = self._call(tool, arguments)
            assert not result.is_error, result.text
            assert text in result.text

    def test_bad_arguments_are_answered(self, tool: BaseTool) -> None:
        """Check that invalid arguments are answered with an error text for the model."""
        for arguments in self.bad:
            (result,) = self._call(tool, arguments)
            assert result.is_error
            assert result.text

    def test_rollouts_do_not_share_state(self, tool: BaseTool) -> None:
        """Check that calls of one rollout do not affect the next."""
        arguments = [arguments for arguments, _ in self.cases]
        first = [result.text for result in self._call(tool, *arguments)]
        assert [result.text for result in self._call(tool, *arguments)] == first

    def test_calls_at_once(self, tool: BaseTool) -> None:
        """Check that concurrent calls of one reply all succeed."""
        results = self._call(tool, *[arguments for arguments, _ in self.cases] * 4, at_once=True)
        assert not any(result.is_error for result in results)
