"""The rollouts' conformance suite on a CUDA device."""

from __future__ import annotations

from rollcast_testing.cuda import needs_cuda
from rollcast_testing.rollout import RolloutSuite

pytestmark = needs_cuda


class TestHfOnCuda(RolloutSuite):
    name = "hf"
