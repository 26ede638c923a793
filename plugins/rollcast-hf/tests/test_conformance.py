from __future__ import annotations

from rollcast.testing.rollout import RolloutSuite


class TestHf(RolloutSuite):
    name = "hf"
