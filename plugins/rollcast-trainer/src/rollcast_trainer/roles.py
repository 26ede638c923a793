"""The roles that workers play in a run."""

from __future__ import annotations

from enum import Enum

__all__ = ["Role"]


class Role(Enum):
    """A role, and the name under which its workers are hosted and placed."""

    ACTOR_ROLLOUT = "actor_rollout"
    """The policy in training, and its rollout in the same process."""
    ACTOR_ROLLOUT_REF = "actor_rollout_ref"
    """The same with the frozen reference policy beside it."""
    REF = "ref"
    """The reference policy by itself."""
    CRITIC = "critic"
    """The value model."""
    ROLLOUT = "rollout"
    """Replicas of an inference engine, in processes of their own."""
    REWARD_MODEL = "reward_model"
    """The model that scores responses."""

    @property
    def has_reference(self) -> bool:
        """Whether the workers hold a reference policy too."""
        return "ref" in self.value

    @property
    def trains(self) -> bool:
        """Whether it has a state that checkpoints keep."""
        return self not in (Role.REF, Role.REWARD_MODEL, Role.ROLLOUT)

    @property
    def mesh(self) -> str:
        """The mesh that its workers register."""
        return "actor" if self in (Role.ACTOR_ROLLOUT, Role.ACTOR_ROLLOUT_REF) else self.value

    @property
    def placed_as(self) -> str:
        """Its name in ``placement.mapping``: the actor's stays the same with a reference beside it."""
        return "actor_rollout" if self is Role.ACTOR_ROLLOUT_REF else self.value
