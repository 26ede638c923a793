"""Contract of controllers of the KL penalty's weight in the reward, and the two controllers of this package.

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
"""A deviation from the target counts as at most this share of it; the paper's value."""


@dataclass(frozen=True)
class KlControllerSettings:
    """Settings of a KL controller; the keys of the same names in ``algorithm``.

    Attributes:
        kl_coef: initial coefficient.
        target_kl: target KL per token of an adaptive controller, in nats.
        horizon: samples over which an adaptive controller corrects a deviation.
    """

    kl_coef: float = 0.001
    target_kl: float = 0.1
    horizon: int = 10_000


class BaseKlController(ABC):
    """The weight of a KL penalty in the reward, now ``value``; its state is part of a checkpoint."""

    def __init__(self, settings: KlControllerSettings) -> None:
        self.settings = settings
        self.value = settings.kl_coef

    @abstractmethod
    def update(self, current_kl: float, n_steps: int) -> None:
        """Set ``value`` for the next step, from a batch of ``n_steps`` rows with a mean KL per token, in nats."""

    def state_dict(self) -> dict[str, Any]:
        """Return all state that :meth:`load_state_dict` needs."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned; KeyError for another kind of controller's."""
        self.value = float(state["value"])


class FixedKlController(BaseKlController):
    """``kl_coef`` throughout."""

    def update(self, current_kl: float, n_steps: int) -> None:
        """Change nothing."""


class AdaptiveKlController(BaseKlController):
    """Raises the coefficient while the KL is above its target, and lowers it below.

    ::

        coef ← coef · (1 + clamp(kl / target_kl - 1, ±0.2) · n_steps / horizon)

    Source: Ziegler et al. 2019, Fine-Tuning Language Models from Human Preferences, arXiv:1909.08593.

    Raises:
        ValueError: when made, ``target_kl`` or ``horizon`` is not above 0.
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
