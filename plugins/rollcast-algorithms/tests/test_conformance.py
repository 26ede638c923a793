"""The first-party parts pass the suites that third parties are given."""

from __future__ import annotations

import pytest

from rollcast.contracts.algorithm import AdvantageEstimator, PolicyLoss
from rollcast.testing import AdvantageSuite, PolicyLossSuite
from rollcast_algorithms import gae, grpo, vanilla


class TestGrpo(AdvantageSuite):
    @pytest.fixture
    def estimator(self) -> AdvantageEstimator:
        return grpo


class TestGae(AdvantageSuite):
    @pytest.fixture
    def estimator(self) -> AdvantageEstimator:
        return gae


class TestVanilla(PolicyLossSuite):
    @pytest.fixture
    def policy_loss(self) -> PolicyLoss:
        return vanilla
