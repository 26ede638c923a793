from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from vllm_tools import kill

from rollcast.contracts.rollout import BaseRollout
from rollcast_serving.in_flight import hold_requests
from rollcast_testing.rollout import RolloutSuite
from rollcast_vllm.rollout import VllmRollout

pytest.importorskip("vllm")


class TestVllm(RolloutSuite):
    name = "vllm"
    shared = True
    rollout_config: ClassVar = {"kv_cache_memory_bytes": 64 << 20}
    lora_config: ClassVar = {"enable_lora": True, "max_lora_rank": 8}
    routing_config: ClassVar = None  # vLLM records on a GPU only
    kill_engine = staticmethod(kill)

    @pytest.fixture(scope="class")
    @classmethod
    def shared_rollouts(cls, shared: VllmRollout) -> list[BaseRollout]:
        return [shared]

    def test_interrupted_requests_go_on_with_the_new_weights(
        self, rollout: Any, reference: Any, tmp_path: Path
    ) -> None:
        held = hold_requests(rollout, "interrupt")
        self.test_requests_under_way_during_a_weight_update(held, reference, tmp_path)
