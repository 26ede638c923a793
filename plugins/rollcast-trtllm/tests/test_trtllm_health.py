"""The health check of the engine."""

from __future__ import annotations

from rollcast_testing import HealthCheckSuite


class TestTrtllm(HealthCheckSuite):
    name = "trtllm"
    configs = ({"rollout": {"name": "trtllm"}}, {"rollout": {"name": "trtllm", "replica": {"python": "/some/python"}}})
