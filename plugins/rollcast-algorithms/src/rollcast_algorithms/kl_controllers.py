"""Contract of KL controllers, which set the weight of the KL penalty in the reward, and two implementations.

Example::

    class Decay(BaseKlController):
        def update(self, current_kl, n_steps):
            self.value *= 0.99
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollcast.plugins import Registry, subclass_of

__all__ = [
    "MAX_ERROR",
    "AdaptiveKlController",
    "BaseKlController",
    "FixedKlController",
    "KlControllerSettings",
    "kl_controllers",
]

MAX_ERROR = 0.2
"""Bound of the relative deviation from the target; the paper's value."""


@dataclass(frozen=True)
class KlControllerSettings:
    """Settings of a KL controller, from the keys of the same names in ``algorithm``.

    Attributes:
        kl_coef: initial coefficient.
        target_kl: target KL per token of an adaptive controller, in nats.
        horizon: number of samples over which an adaptive controller corrects a deviation.
    """

    kl_coef: float = 0.001
    target_kl: float = 0.1
    horizon: int = 10_000


class BaseKlController(ABC):
    """Base class of KL controllers. ``value`` is the current weight; the state is part of a checkpoint."""

    def __init__(self, settings: KlControllerSettings) -> None:
        self.settings = settings
        self.value = settings.kl_coef

    @abstractmethod
    def update(self, current_kl: float, n_steps: int) -> None:
        """Set ``value`` for the next step, from a batch of ``n_steps`` rows and its mean KL per token in nats."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for :meth:`load_state_dict`."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore state returned by :meth:`state_dict`; KeyError for the state of another kind of controller."""
        self.value = float(state["value"])


class FixedKlController(BaseKlController):
    """A controller with the constant weight ``kl_coef``."""

    def update(self, current_kl: float, n_steps: int) -> None:
        """Do nothing."""


class AdaptiveKlController(BaseKlController):
    """A controller that raises the coefficient while the KL is above its target and lowers it while below.

    ::

        coef ← coef · (1 + clamp(kl / target_kl - 1, ±0.2) · n_steps / horizon)

    Source: Ziegler et al. 2019, Fine-Tuning Language Models from Human Preferences, arXiv:1909.08593.

    Raises:
        ValueError: ``target_kl`` or ``horizon`` is not above 0.
    """

    def __init__(self, settings: KlControllerSettings) -> None:
        if not (settings.target_kl > 0 and settings.horizon > 0):
            raise ValueError(
                "algorithm.kl_controller=adaptive needs algorithm.target_kl and algorithm.horizon above 0, "
                f"got {settings.target_kl} and {settings.horizon}"
            )
        super().__init__(settings)

    def update(self, current_kl: float, n_steps: int) -> None:
        error = min(max(current_kl / self.settings.target_kl - 1.0, -MAX_ERROR), MAX_ERROR)
        self.value *= 1.0 + error * n_steps / self.settings.horizon


kl_controllers: Registry[type[BaseKlController]] = Registry(
    "rollcast.kl_controllers",
    subclass_of(BaseKlController),
    "algorithm.kl_controller",
    description="schedules of the KL coefficient over steps",
)
