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
        reward_manager_kwargs: options of the manager, as keyword arguments of its class.
        timeout_s: the longest that the reward of one sample may take; empty for no limit.
        on_error: what becomes of a sample whose reward raises, takes too long or gives no finite number:
            ``stop`` ends the run, ``zero`` scores it 0, ``drop`` leaves it out of the update.
        max_bad_share: with ``zero`` and ``drop``, the share of a batch that may be bad; more end the run.
    """

    name: str = "exact_match"
    reward_manager: str = "naive"
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    reward_manager_kwargs: dict[str, Any] = field(default_factory=dict)
    timeout_s: float | None = 30.0
    on_error: str = "stop"
    max_bad_share: float = 0.1
