"""The health check of the engine."""

from __future__ import annotations

from rollcast_testing import HealthCheckSuite


class TestSglang(HealthCheckSuite):
    name = "sglang"
    configs = ({"rollout": {"name": "sglang"}}, {"rollout": {"name": "sglang", "replica": {"python": "/some/python"}}})
