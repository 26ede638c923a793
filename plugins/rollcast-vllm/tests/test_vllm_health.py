"""The health check of the engine."""

from __future__ import annotations

import pytest

from rollcast_testing import HealthCheckSuite
from rollcast_vllm.health import VllmCheck


class TestVllm(HealthCheckSuite):
    name = "vllm"
    configs = ({"rollout": {"name": "vllm"}}, {"rollout": {"name": "vllm", "replica": {"python": "/some/python"}}})


def test_forked_engines_are_a_trap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    assert not list(VllmCheck().find_traps())
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    (found,) = VllmCheck().find_traps()
    assert "unset VLLM_WORKER_MULTIPROC_METHOD" in found.fix
