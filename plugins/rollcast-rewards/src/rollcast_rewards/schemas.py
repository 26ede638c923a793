"""Schema of the config's ``reward`` section; importable without torch."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from rollcast.contracts.config import Fraction, Gt, config

__all__ = ["RewardConfig"]


@config
class RewardConfig:
    """The reward that scores responses."""

    name: str = "exact_match"
    """Registry name of the reward."""
    reward_manager: str = "naive"
    """Registry name of the manager that applies the reward to a batch."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the reward, as keyword arguments of its class."""
    reward_manager_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the manager, as keyword arguments of its class."""
    timeout_s: Annotated[float, Gt(0)] | None = 30.0
    """Timeout of one sample's reward in seconds; null for none."""
    on_error: Literal["stop", "zero", "drop"] = "stop"
    """Treatment of a sample whose reward raises, times out or is not finite: `stop` ends the run, `zero` scores it 0,
    `drop` leaves it out of the update."""
    max_bad_share: Fraction = 0.1
    """Largest share of bad samples in a batch with `zero` and `drop`; a larger share ends the run."""
