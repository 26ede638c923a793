from __future__ import annotations

from typing import Any


def control_action_decorator(method: Any) -> Any:
    """Wait until no request is active, then call the method while the engine's loop stands still."""

    def controlled(worker: Any, *args: Any) -> Any:
        assert worker.engine.llm.running == 0
        return method(worker, *args)

    return controlled
