"""The roles that workers play in a run."""

from __future__ import annotations

from enum import Enum

__all__ = ["Role"]


class Role(Enum):
    """A role, and the name under which its workers are hosted."""

    ACTOR_ROLLOUT = "actor_rollout"
    """The policy in training, and its rollout in the same process."""
    ACTOR_ROLLOUT_REF = "actor_rollout_ref"
    """The same with the frozen reference policy beside it."""

    @property
    def has_reference(self) -> bool:
        """Whether the workers hold a reference policy too."""
        return "ref" in self.value
