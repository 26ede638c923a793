"""Conformance tests of KL controllers.

Derive a class and name the controller::

    from rollcast_algorithms.testing import KlControllerSuite

    class TestMyController(KlControllerSuite):
        name = "my_controller"
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import ClassVar

from rollcast_algorithms.kl_controllers import BaseKlController, KlControllerSettings, kl_controllers
from rollcast_testing.checks import require

__all__ = ["KlControllerSuite"]


class KlControllerSuite:
    """Conformance tests of one KL controller; subclass it and set the name.

    Attributes:
        name: name of the controller in ``rollcast.kl_controllers``.
        divergences: mean KL per token of the steps of a simulated run, in nats.
    """

    name: ClassVar[str] = ""
    divergences: ClassVar[Sequence[float]] = (0.0, 0.05, 0.4, 2.0, 0.1, 0.01, 50.0)

    def settings(self) -> KlControllerSettings:
        """Return the settings of the controller under test."""
        return KlControllerSettings(kl_coef=0.02, target_kl=0.1, horizon=1000)

    def build(self) -> BaseKlController:
        """Build a controller; override it for a class that is not registered."""
        return kl_controllers.get(self.name)(self.settings())

    def _values(self, controller: BaseKlController, divergences: Sequence[float]) -> list[float]:
        values = []
        for divergence in divergences:
            controller.update(divergence, 64)
            values.append(controller.value)
        return values

    def test_starts_with_the_coefficient(self) -> None:
        value, asked = self.build().value, self.settings().kl_coef
        require(value == asked, f"the first coefficient is algorithm.kl_coef, {asked}, not {value}")

    def test_coefficients_are_finite_and_not_negative(self) -> None:
        values = self._values(self.build(), self.divergences)
        require(all(math.isfinite(value) and value >= 0 for value in values), f"coefficients {values} are finite, >= 0")

    def test_the_same_run_has_the_same_coefficients(self) -> None:
        first, second = (self._values(self.build(), self.divergences) for _ in range(2))
        require(first == second, f"the same divergences give the same coefficients, not {first} and {second}")

    def test_a_resumed_run_continues(self) -> None:
        """Check that the state, written as JSON after each step, continues as an uninterrupted run."""
        expected = self._values(self.build(), self.divergences)
        for step in range(len(self.divergences)):
            controller = self.build()
            self._values(controller, self.divergences[:step])
            resumed = self.build()
            resumed.load_state_dict(json.loads(json.dumps(controller.state_dict())))
            rest = self._values(resumed, self.divergences[step:])
            require(rest == expected[step:], f"resumed after {step} steps: {rest} are {expected[step:]}")
