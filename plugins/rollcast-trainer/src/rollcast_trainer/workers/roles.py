"""The roles that workers play in a run.

A role is a name. The registry ``rollcast.roles`` maps it to a worker class. Attributes of the class say whether
checkpoints keep its state (``trains``) and which mesh its workers register (``mesh``).
"""

from __future__ import annotations

from enum import StrEnum

from rollcast.contracts.stage import roles

__all__ = ["Role", "is_served", "mesh_of", "placed_as", "role_trains"]


class Role(StrEnum):
    """Names of the roles of this package; a recipe may add others."""

    ACTOR_ROLLOUT = "actor_rollout"
    """The policy in training, and its rollout in the same process."""
    ACTOR_ROLLOUT_REF = "actor_rollout_ref"
    """The policy in training and its rollout, with the frozen reference policy in the same process."""
    REF = "ref"
    """The reference policy in workers of its own."""
    CRITIC = "critic"
    """The value model."""
    ROLLOUT = "rollout"
    """Replicas of an inference engine, in processes of their own."""
    REWARD_MODEL = "reward_model"
    """The model that scores responses."""
    REWARD = "reward"
    """Processes that compute the run's reward."""
    JUDGE = "judge"
    """Replicas of the judge model that rewards call, in processes of their own."""


def is_served(role: str) -> bool:
    """Return True if replicas of an inference engine play the role instead of a worker class."""
    return role in (Role.ROLLOUT, Role.JUDGE)


def placed_as(role: str) -> str:
    """Return the role's name in ``placement.mapping``; a reference fused into the actor's workers is placed as the
    actor.
    """
    return str(Role.ACTOR_ROLLOUT) if role == Role.ACTOR_ROLLOUT_REF else str(role)


def role_trains(role: str) -> bool:
    """Return True if checkpoints keep the state of the role's workers."""
    return not is_served(role) and bool(getattr(roles.get(placed_as(role)), "trains", False))


def mesh_of(role: str) -> str:
    """Return the name of the mesh that the role's workers register: the class's ``mesh``, else the role's name."""
    return str(getattr(roles.get(placed_as(role)), "mesh", role))
