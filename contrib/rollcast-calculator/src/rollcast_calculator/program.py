"""An agent written without rollcast, with the public ``openai`` client, a tool and a loop."""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from rollcast_calculator.task import calculator

__all__ = ["answer"]

_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Calculate the value of an expression of whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


async def answer(task: dict[str, Any], *, base_url: str, api_key: str) -> None:
    """Answer the task's question with at most one call of the calculator.

    Returns None, so that the run's reward scores the conversation.
    """
    messages: list[Any] = list(task["prompt"])
    # The gateway uses plain HTTP, because loading certificates for every conversation would take most of a step.
    plain = DefaultAsyncHttpxClient(verify=False)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=plain) as client:
        reply = (await client.chat.completions.create(model="policy", messages=messages, tools=[_TOOL])).choices[0]
        if not reply.message.tool_calls:
            return
        messages.append(reply.message.model_dump(exclude_none=True))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": _result(call)} for call in reply.message.tool_calls
        ]
        await client.chat.completions.create(model="policy", messages=messages, tools=[_TOOL])


def _result(call: Any) -> str:
    try:
        return calculator(json.loads(call.function.arguments)["expression"])
    except (ValueError, KeyError, TypeError) as error:
        return f"Error: {error}"
