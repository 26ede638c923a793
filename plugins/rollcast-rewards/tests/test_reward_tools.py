"""The tool ``calc_gsm8k_reward``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from rollcast_agents.contracts.tool import ToolResult
from rollcast_rewards.tools import Gsm8kTool


def results(answers: Sequence[dict[str, Any]], ground_truth: str = "1080") -> list[ToolResult]:
    async def run() -> list[ToolResult]:
        tool = Gsm8kTool(penalty=0.1)
        state = await tool.open({"ground_truth": ground_truth})
        return [await tool.call(state, arguments) for arguments in answers]

    return asyncio.run(run())


def test_an_answer_that_is_no_better_than_before_costs() -> None:
    found = results([{"answer": "7"}, {"answer": "1,080"}, {"answer": "#### 1080"}, {"answer": "7"}])
    assert [each.metrics["right"] for each in found] == [0.0, 1.0, 1.0, 0.0]
    assert [each.reward for each in found] == [-0.1, 0.0, -0.1, -0.1]
    assert "is 1.0" in found[1].text


def test_rollouts_share_nothing() -> None:
    assert results([{"answer": 1080}])[0].reward == 0.0
    assert results([{"answer": 1080}])[0].reward == 0.0


@pytest.mark.parametrize("arguments", [{}, {"answer": None}, {"answer": ["7"]}, {"answer": "7", "more": 1}, {"x": "7"}])
def test_other_arguments_are_answered(arguments: dict[str, Any]) -> None:
    (found,) = results([arguments])
    assert found.is_error
    assert (found.reward, "one argument" in found.text) == (0.0, True)
