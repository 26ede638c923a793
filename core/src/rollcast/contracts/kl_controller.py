"""The contract of KL controllers: how the weight of a KL penalty in the reward changes over steps.

Example::

    class Doubling(BaseKlController):
        def update(self, current_kl: float, n_steps: int) -> None:
            if current_kl > self.settings.target_kl:
                self.value *= 2
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollcast.plugins import Registry, subclass_of

__all__ = ["BaseKlController", "KlControllerSettings", "kl_controllers"]


@dataclass(frozen=True)
class KlControllerSettings:
    """What a controller is built from: the keys of the same names in the config's ``algorithm``.

    Attributes:
        kl_coef: the first coefficient.
        target_kl: the KL per token that an adaptive controller aims at, in nats.
        horizon: samples over which it corrects a deviation.
    """

    kl_coef: float = 0.001
    target_kl: float = 0.1
    horizon: int = 10_000


class BaseKlController(ABC):
    """Holds the coefficient; its state is part of a checkpoint.

    Attributes:
        settings: what it was built from.
        value: the coefficient to use now.
    """

    def __init__(self, settings: KlControllerSettings) -> None:
        self.settings = settings
        self.value = settings.kl_coef

    @abstractmethod
    def update(self, current_kl: float, n_steps: int) -> None:
        """Choose the next coefficient.

        Args:
            current_kl: mean KL per token of the step's batch, in nats.
            n_steps: samples (rows) of that batch.
        """

    def state_dict(self) -> dict[str, Any]:
        """All that :meth:`load_state_dict` needs to go on as if nothing had happened."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave.

        Raises:
            KeyError: the state is of another kind of controller.
        """
        self.value = float(state["value"])


kl_controllers: Registry[type[BaseKlController]] = Registry(
    "rollcast.kl_controllers",
    subclass_of(BaseKlController),
    "algorithm.kl_controller",
    description="schedules of the KL coefficient over steps",
)
