"""The config's ``reward`` section; importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["RewardConfig"]


@dataclass
class RewardConfig:
    """Which reward scores the responses.

    Attributes:
        name: the reward, in the group ``rollcast.rewards``.
        reward_manager: what applies it to a batch, in the group ``rollcast.reward_managers``.
        reward_kwargs: options of the reward, as keyword arguments of its class.
    """

    name: str = "exact_match"
    reward_manager: str = "naive"
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
