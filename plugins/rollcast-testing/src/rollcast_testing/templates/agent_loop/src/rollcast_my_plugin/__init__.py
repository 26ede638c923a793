"""The loop ``my_plugin``: an answer, and a second one after a look at the first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollcast_agents.contracts.agent_loop import BaseAgentLoop, Outcome
from rollcast_agents.contracts.environment import BaseEnvironment
from rollcast_agents.contracts.session import Session


class MyPlugin(BaseAgentLoop):
    """Asks the model to check its answer."""

    async def run(self, task: Mapping[str, Any], session: Session, environment: BaseEnvironment | None) -> Outcome:
        messages = list(task["prompt"])
        first = await session.sample(messages)
        messages.append({"role": "assistant", "content": first.message.text})
        if first.end is not None:
            return Outcome(first.end, messages=messages)
        messages.append({"role": "user", "content": "Check your answer, then give it again."})
        second = await session.sample(messages)
        messages.append({"role": "assistant", "content": second.message.text})
        return Outcome(second.end or "done", messages=messages, metrics={"changed": first.message != second.message})
