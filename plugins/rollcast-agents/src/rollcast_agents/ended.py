"""The error of a call to users' code that ended its process."""

from __future__ import annotations

from rollcast_agents.contracts.trajectory import Boundary

__all__ = ["ProcessEnded"]


class ProcessEnded(Exception):
    """A call to users' code ended its process, or hangs in it.

    Attributes:
        boundary: part of the rollout that was called.
        is_final: True if the call is known to be the cause; else the rollout runs again in a process of its own.
    """

    def __init__(self, message: str, boundary: Boundary, is_final: bool) -> None:
        super().__init__(message)
        self.boundary: Boundary = boundary
        self.is_final = is_final
