from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hf_tools import ModuleEngine, run_all

from rollcast.contracts.engine import EngineCapabilities
from rollcast.contracts.rollout import RolloutCapabilities, SamplingParams
from rollcast.errors import CapabilityError
from rollcast_hf.rollout import HfRollout
from rollcast_hf.sync import InProcessSync
from rollcast_serving.testing import WeightSyncSuite


def test_binds_once_and_moves_the_version(rollout: HfRollout, model: Any) -> None:
    engine: Any = ModuleEngine(model)
    sync = InProcessSync(engine, [rollout])
    for version in (3, 4):
        (report,) = asyncio.run(sync.sync(version))
        assert report.version == version
        assert report.tensors == len(list(model.parameters()))
        assert report.bytes == sum(each.numel() for each in model.parameters()) * 4
        assert engine.entered == 1
    (output,) = run_all(rollout, [[5]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert list(output.sequences[0].weight_versions) == [4, 4, 4]


def test_refuses_parts_that_cannot(rollout: HfRollout, engine: Any) -> None:
    class Remote(HfRollout):
        capabilities = RolloutCapabilities()

    with pytest.raises(CapabilityError, match="Remote"):
        InProcessSync(engine, [Remote(rollout.setup)])
    engine.capabilities = EngineCapabilities()
    with pytest.raises(CapabilityError, match="ModuleEngine"):
        InProcessSync(engine, [rollout])


class TestInProcess(WeightSyncSuite):
    name = "in_process"

    @pytest.fixture(autouse=True)
    def _pair(self, rollout: HfRollout, engine: ModuleEngine) -> None:
        self._engine, self._rollout = engine, rollout

    def in_process_pair(self) -> tuple[Any, Any]:
        return self._engine, self._rollout
