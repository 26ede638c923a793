"""Conformance suites for authors of parts; they need the extra ``rollcast[testing]``.

A suite is a class of pytest tests. Derive from it in a test module, say which part is meant, and
pytest finds the tests it inherits::

    from rollcast_testing import AdvantageSuite

    class TestMyEstimator(AdvantageSuite):
        name = "my_estimator"
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollcast_testing.advantage import AdvantageSuite
    from rollcast_testing.dispatch import DispatchSuite
    from rollcast_testing.engine import EngineSuite
    from rollcast_testing.engine_ranks import Layout
    from rollcast_testing.policy_loss import PolicyLossSuite
    from rollcast_testing.reward import RewardManagerSuite, RewardSuite
    from rollcast_testing.rollout import RolloutSuite

_EXPORTS = {
    "AdvantageSuite": "rollcast_testing.advantage",
    "DispatchSuite": "rollcast_testing.dispatch",
    "EngineSuite": "rollcast_testing.engine",
    "Layout": "rollcast_testing.engine_ranks",
    "PolicyLossSuite": "rollcast_testing.policy_loss",
    "RewardManagerSuite": "rollcast_testing.reward",
    "RewardSuite": "rollcast_testing.reward",
    "RolloutSuite": "rollcast_testing.rollout",
}

__all__ = [
    "AdvantageSuite",
    "DispatchSuite",
    "EngineSuite",
    "Layout",
    "PolicyLossSuite",
    "RewardManagerSuite",
    "RewardSuite",
    "RolloutSuite",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
