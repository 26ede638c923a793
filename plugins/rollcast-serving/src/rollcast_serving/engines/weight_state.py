"""Usability of an engine's weights between updates."""

from __future__ import annotations

from typing import Literal

from rollcast.errors import WeightSyncError

__all__ = ["WeightState"]

Part = Literal["weights", "adapter"]


class WeightState:
    """The reasons why an engine must not generate with its present weights and adapter.

    Args:
        problem: reason from the start, such as an engine without weights; empty for none.
    """

    def __init__(self, problem: str = "") -> None:
        self._problems: dict[str, WeightSyncError] = {}
        if problem:
            self.forbid("weights", problem)

    def forbid(self, part: Part, problem: str, tensor: str = "") -> WeightSyncError:
        """Refuse to generate until :meth:`accept`; return the error for requests that wait."""
        error = WeightSyncError(f"{problem}; nothing is generated until an update succeeds", tensor=tensor)
        self._problems[part] = error
        return error

    def fail(self, part: Part, version: int, error: BaseException) -> WeightSyncError:
        """Refuse to generate after a failed update; return the error for requests that wait."""
        problem = f"the update of the {part} to version {version} failed: {str(error) or type(error).__name__}"
        return self.forbid(part, problem, getattr(error, "tensor", ""))

    def accept(self, part: Part) -> None:
        """Allow generating with a part that is right now; new weights also replace a wrong adapter."""
        if part == "weights":
            self._problems.clear()
        else:
            self._problems.pop(part, None)

    def check(self) -> None:
        """Raise if nothing may be generated.

        Raises:
            WeightSyncError: no update has arrived, or the last one failed.
        """
        for error in self._problems.values():
            # Raised in many places: one traceback each.
            raise WeightSyncError(str(error), tensor=error.tensor)
