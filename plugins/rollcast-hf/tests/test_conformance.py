from __future__ import annotations

from pathlib import Path
from typing import Any

from rollcast_serving.in_flight import hold_requests
from rollcast_testing.rollout import RolloutSuite


class TestHf(RolloutSuite):
    name = "hf"
    long_tokens = 100

    def test_interrupted_requests_go_on_with_the_new_weights(
        self, rollout: Any, reference: Any, tmp_path: Path
    ) -> None:
        held = hold_requests(rollout, "interrupt")
        self.test_requests_under_way_during_a_weight_update(held, reference, tmp_path)
