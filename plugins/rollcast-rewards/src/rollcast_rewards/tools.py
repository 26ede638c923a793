"""The tools ``python``, which runs programs of the model in the sandbox, and ``calc_gsm8k_reward``."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from rollcast.contracts.reward import RewardSample
from rollcast_agents.contracts.tool import BaseTool, ToolResult
from rollcast_data.chat_template import ToolSchema
from rollcast_rewards.rules import gsm8k
from rollcast_rewards.sandbox import SandboxLimits, check_allowed, run_sandboxed

__all__ = ["Gsm8kTool", "PythonTool"]

_SCHEMA = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run a Python program and return what it prints. Nothing is kept between calls.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program."}},
            "required": ["code"],
        },
    },
}

_GSM8K_SCHEMA = {
    "type": "function",
    "function": {
        "name": "calc_gsm8k_reward",
        "description": "Check an answer to the question: the reward is 1.0 if it is right and 0.0 if it is not.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "The answer, a number."}},
            "required": ["answer"],
        },
    },
}


@dataclass
class _Tried:
    """State of one rollout: the reference answer, and the best reward of an answer so far."""

    ground_truth: Any
    best: float = 0.0


class Gsm8kTool(BaseTool):
    """A tool that checks the model's answer to a GSM8K question, like verl's tool of the same name.

    A call that does not improve on the best earlier call costs ``penalty``, and so does a wrong first call.

    Args:
        penalty: amount subtracted from the reward of the turn.
    """

    def __init__(self, penalty: float = 0.05) -> None:
        self._penalty = penalty

    @property
    def schema(self) -> ToolSchema:
        return _GSM8K_SCHEMA

    async def open(self, task: Mapping[str, Any]) -> _Tried:
        return _Tried(task.get("ground_truth"))

    async def call(self, state: _Tried, arguments: Mapping[str, Any]) -> ToolResult:
        if set(arguments) != {"answer"} or not isinstance(arguments["answer"], str | int | float):
            return ToolResult("calc_gsm8k_reward takes one argument, answer, a number.", is_error=True)
        answer = str(arguments["answer"])
        marked = answer if "####" in answer else f"#### {answer}"
        reward = gsm8k(RewardSample("", marked, state.ground_truth))
        is_better = reward > state.best
        state.best = max(state.best, reward)
        text = f"The reward of the answer {answer!r} is {reward}."
        return ToolResult(text, 0.0 if is_better else -self._penalty, {"right": reward})


class PythonTool(BaseTool):
    """A tool that runs each program in a sandboxed process.

    Args:
        time_s, cpu_s, memory_mb, output_kb: limits of a program, see :class:`SandboxLimits`.
        allow_missing: promised kinds of isolation without which programs may run on this machine.

    Raises:
        ConfigError: a limit is not positive, or a kind of isolation is unknown.
    """

    def __init__(
        self,
        time_s: float = 10.0,
        cpu_s: float = 10.0,
        memory_mb: int = 512,
        output_kb: int = 64,
        allow_missing: Collection[str] = (),
    ) -> None:
        self._limits = SandboxLimits(time_s, cpu_s, memory_mb, output_kb)
        self._allow_missing = check_allowed(allow_missing, "agent.tools.python.allow_missing")

    @property
    def schema(self) -> ToolSchema:
        return _SCHEMA

    async def call(self, state: Any, arguments: Mapping[str, Any]) -> ToolResult:
        code = arguments.get("code")
        if set(arguments) != {"code"} or not isinstance(code, str):
            return ToolResult("python takes one argument, code, a text.", is_error=True)
        result = await asyncio.to_thread(run_sandboxed, code, "", self._limits, self._allow_missing)
        if result.status == "ok":
            return ToolResult(result.stdout)
        said = "\n".join(filter(None, (result.stdout.strip(), result.stderr.strip())))
        reason = "" if result.status == "error" else f"The program passed its limit of {result.status}.\n"
        return ToolResult(reason + said, is_error=True)
