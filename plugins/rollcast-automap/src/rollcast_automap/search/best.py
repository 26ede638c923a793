"""The best mappings that a search has found so far."""

from __future__ import annotations

from rollcast.errors import ResourceError
from rollcast_automap.contract import Prediction, Problem

__all__ = ["Best"]


class Best:
    """The best mappings found so far, by step time and then by the order of the search.

    Args:
        count: number of mappings to keep.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._found: list[Prediction] = []

    @property
    def limit(self) -> float:
        """Step time in seconds that a mapping has to beat."""
        return self._found[-1].step_seconds if len(self._found) == self._count else float("inf")

    def offer(self, prediction: Prediction) -> None:
        """Keep a mapping if it is among the best and differs from the kept ones in more than its mode."""
        if prediction.step_seconds < self.limit and not any(_is_twin(prediction, other) for other in self._found):
            self._found = sorted([*self._found, prediction], key=lambda candidate: candidate.step_seconds)[
                : self._count
            ]

    def list(self, problem: Problem) -> list[Prediction]:
        """Return the best mappings by rising step time.

        Raises:
            ResourceError: no mapping was found.
        """
        if self._found:
            return self._found
        roles = ", ".join(role.name for role in problem.roles)
        raise ResourceError(
            f"no mapping of {roles} fits {problem.cluster.devices} devices with headroom "
            f"{problem.constraints.headroom:g} under these constraints; add devices, allow roles to share pools, or "
            "set offload or recompute"
        )


def _is_twin(one: Prediction, other: Prediction) -> bool:
    mine, its = one.mapping, other.mapping
    places = mine.pools == its.pools and mine.placements == its.placements
    return places and one.step_seconds == other.step_seconds and mine.max_staleness == its.max_staleness
