"""Controllers of the weight of the KL penalty in the reward."""

from __future__ import annotations

from rollcast.contracts.algorithm import BaseKlController, KlControllerSettings

__all__ = ["MAX_ERROR", "AdaptiveKlController", "FixedKlController"]

MAX_ERROR = 0.2
"""A deviation from the target counts as at most this share of it; the paper's value."""


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
