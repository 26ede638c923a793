"""The health check of the engine."""

from __future__ import annotations

from rollcast_testing import HealthCheckSuite


class TestVllm(HealthCheckSuite):
    name = "vllm"
    configs = ({"rollout": {"name": "vllm"}}, {"rollout": {"name": "vllm", "replica": {"python": "/some/python"}}})
