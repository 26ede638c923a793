"""Conformance suites for plugin authors; they need the extra ``rollcast[testing]``.

A suite is a class of pytest tests. Derive a class from it in a test module and set the name of the plugin; pytest
collects the inherited tests::

    from rollcast_testing import AdvantageSuite

    class TestMyEstimator(AdvantageSuite):
        name = "my_estimator"
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollcast import lazy_exports

if TYPE_CHECKING:
    from rollcast_testing.advantage import AdvantageSuite as AdvantageSuite
    from rollcast_testing.aggregation import LossAggregationSuite as LossAggregationSuite
    from rollcast_testing.commands import CommandSuite as CommandSuite
    from rollcast_testing.commands import HooksSuite as HooksSuite
    from rollcast_testing.dispatch import DispatchSuite as DispatchSuite
    from rollcast_testing.engine import EngineSuite as EngineSuite
    from rollcast_testing.engine_ranks import Layout as Layout
    from rollcast_testing.health import HealthCheckSuite as HealthCheckSuite
    from rollcast_testing.kl_penalty import KlPenaltySuite as KlPenaltySuite
    from rollcast_testing.policy_loss import PolicyLossSuite as PolicyLossSuite
    from rollcast_testing.recipe import RecipeSuite as RecipeSuite
    from rollcast_testing.reward import RewardManagerSuite as RewardManagerSuite
    from rollcast_testing.reward import RewardSuite as RewardSuite
    from rollcast_testing.rollout import RolloutSuite as RolloutSuite
    from rollcast_testing.runtime import RuntimeSuite as RuntimeSuite
    from rollcast_testing.simulated import SimulatedRuntime as SimulatedRuntime
    from rollcast_testing.stage import StageSuite as StageSuite
    from rollcast_testing.tracker import TrackerSuite as TrackerSuite
    from rollcast_testing.trainer import TrainerSuite as TrainerSuite

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "advantage": ["AdvantageSuite"],
        "aggregation": ["LossAggregationSuite"],
        "commands": ["CommandSuite", "HooksSuite"],
        "dispatch": ["DispatchSuite"],
        "engine": ["EngineSuite"],
        "engine_ranks": ["Layout"],
        "health": ["HealthCheckSuite"],
        "kl_penalty": ["KlPenaltySuite"],
        "policy_loss": ["PolicyLossSuite"],
        "recipe": ["RecipeSuite"],
        "reward": ["RewardManagerSuite", "RewardSuite"],
        "rollout": ["RolloutSuite"],
        "runtime": ["RuntimeSuite"],
        "simulated": ["SimulatedRuntime"],
        "stage": ["StageSuite"],
        "tracker": ["TrackerSuite"],
        "trainer": ["TrainerSuite"],
    },
)
