from __future__ import annotations

from rollcast_testing.rollout import RolloutSuite


class TestHf(RolloutSuite):
    name = "hf"
