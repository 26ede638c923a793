"""The controllers of the KL coefficient: worked steps, and what they keep in a checkpoint."""

from __future__ import annotations

import pytest

from rollcast_algorithms.kl_controllers import (
    AdaptiveKlController,
    FixedKlController,
    KlControllerSettings,
    kl_controllers,
)


def test_fixed_stays() -> None:
    controller = FixedKlController(KlControllerSettings(kl_coef=0.3))
    controller.update(5.0, 1000)
    assert controller.value == 0.3


def test_adaptive_worked_steps() -> None:
    controller = AdaptiveKlController(KlControllerSettings(kl_coef=1.0, target_kl=0.1, horizon=100))
    controller.update(0.11, 50)  # 10% above: + 0.1 · 50 / 100
    assert controller.value == pytest.approx(1.05)
    controller.update(9.0, 50)  # far above counts as 20%
    assert controller.value == pytest.approx(1.05 * 1.1)
    controller.update(0.0, 100)  # far below as well
    assert controller.value == pytest.approx(1.05 * 1.1 * 0.8)
    controller.update(0.1, 100)
    assert controller.value == pytest.approx(1.05 * 1.1 * 0.8)


@pytest.mark.parametrize("name", ["fixed", "adaptive"])
def test_a_resumed_controller_goes_on_as_if_nothing_had_happened(name: str) -> None:
    made = kl_controllers.get(name)
    whole, first, second = (made(KlControllerSettings(kl_coef=0.2)) for _ in range(3))
    for kl in (0.5, 0.01):
        whole.update(kl, 64)
        first.update(kl, 64)
    second.load_state_dict(first.state_dict())
    for controller in (whole, second):
        controller.update(0.3, 64)
    assert second.value == whole.value


def test_a_state_without_a_value_is_refused() -> None:
    with pytest.raises(KeyError, match="value"):
        FixedKlController(KlControllerSettings()).load_state_dict({})


@pytest.mark.parametrize("settings", [KlControllerSettings(target_kl=0.0), KlControllerSettings(horizon=0)])
def test_adaptive_refuses_a_target_or_horizon_of_zero(settings: KlControllerSettings) -> None:
    with pytest.raises(ValueError, match=r"algorithm\.target_kl and algorithm\.horizon above 0"):
        AdaptiveKlController(settings)
