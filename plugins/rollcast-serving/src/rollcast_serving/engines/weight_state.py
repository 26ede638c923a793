"""State of an engine's weights between updates: usable or not."""

from __future__ import annotations

from typing import Literal

from rollcast.errors import WeightSyncError

__all__ = ["WeightState"]

Part = Literal["weights", "adapter"]


class WeightState:
    """The reasons why an engine must not generate with its current weights and adapter.

    Args:
        problem: initial reason, such as an engine without weights; empty for none.
    """

    def __init__(self, problem: str = "") -> None:
        self._problems: dict[str, WeightSyncError] = {}
        if problem:
            self.forbid("weights", problem)

    def forbid(self, part: Part, problem: str, tensor: str = "") -> WeightSyncError:
        """Block generation until :meth:`accept`; return the error for waiting requests."""
        error = WeightSyncError(f"{problem}; generation is blocked until an update succeeds", tensor=tensor)
        self._problems[part] = error
        return error

    def fail(self, part: Part, version: int, error: BaseException) -> WeightSyncError:
        """Block generation after a failed update; return the error for waiting requests."""
        problem = f"the update of the {part} to version {version} failed: {str(error) or type(error).__name__}"
        return self.forbid(part, problem, getattr(error, "tensor", ""))

    def accept(self, part: Part) -> None:
        """Allow generation with a part that is valid now; new weights also clear the problem of an adapter."""
        if part == "weights":
            self._problems.clear()
        else:
            self._problems.pop(part, None)

    def check(self) -> None:
        """Raise if generation is blocked.

        Raises:
            WeightSyncError: no update has arrived, or the last one failed.
        """
        for error in self._problems.values():
            # A new error each time, because a shared one would accumulate tracebacks.
            raise WeightSyncError(str(error), tensor=error.tensor)
