"""The tool ``python``, which runs programs of the model in the sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from rollcast.contracts.renderer import ToolSchema
from rollcast.contracts.tool import BaseTool, ToolResult
from rollcast_rewards.sandbox import SandboxLimits, run_sandboxed

__all__ = ["PythonTool"]

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


class PythonTool(BaseTool):
    """A tool that runs each program in a sandboxed process.

    Args:
        time_s, cpu_s, memory_mb, output_kb: limits of a program, see :class:`SandboxLimits`.

    Raises:
        ConfigError: a limit is not positive.
    """

    def __init__(self, time_s: float = 10.0, cpu_s: float = 10.0, memory_mb: int = 512, output_kb: int = 64) -> None:
        self._limits = SandboxLimits(time_s, cpu_s, memory_mb, output_kb)

    @property
    def schema(self) -> ToolSchema:
        return _SCHEMA

    async def call(self, state: Any, arguments: Mapping[str, Any]) -> ToolResult:
        code = arguments.get("code")
        if set(arguments) != {"code"} or not isinstance(code, str):
            return ToolResult("python takes one argument, code, a text.", is_error=True)
        result = await asyncio.to_thread(run_sandboxed, code, "", self._limits)
        if result.status == "ok":
            return ToolResult(result.stdout)
        said = "\n".join(filter(None, (result.stdout.strip(), result.stderr.strip())))
        reason = "" if result.status == "error" else f"The program passed its limit of {result.status}.\n"
        return ToolResult(reason + said, is_error=True)
