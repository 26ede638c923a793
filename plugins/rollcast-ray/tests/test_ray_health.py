"""The health check of Ray, without a Ray."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from rollcast.contracts.health import Finding, HealthSetup
from rollcast_ray import health
from rollcast_ray.health import RayCheck
from rollcast_testing import HealthCheckSuite


class TestRay(HealthCheckSuite):
    name = "ray"
    configs = ({"runtime": {"name": "local"}},)
    faults = (({"runtime": {"object_store_memory": 2**60}}, "object store"),)


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def named(config: Any = None) -> dict[str, Finding]:
    return {each.name: each for each in RayCheck().run(HealthSetup(config))}


def test_another_runtime_needs_no_ray() -> None:
    assert named({"runtime": {"name": "local"}}) == {}


def test_a_cluster_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_worker_niceness", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    found = named({"runtime": {"address": address}})
    assert found["cluster"].state == "problem"
    assert address in found["cluster"].message
    assert "RAY_ADDRESS" in found["cluster"].fix
    assert found["niceness"].state == "warning"


def test_a_cluster_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(*_: Any, **__: Any) -> None:
        raise RuntimeError("Version mismatch: the cluster was started with: Ray: 1.0")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    found = named()["cluster"]
    assert "Version mismatch" in found.message
    assert "on every node" in found.fix


def test_a_cluster_that_can_be_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", lambda *_, **__: None)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}, {"Alive": False}])
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 8.0})
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    found = named({"runtime": {"address": "auto"}})["cluster"]
    assert found.state == "ok"
    assert "1 nodes, 8 GPUs" in found.message


def test_what_earlier_sessions_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def process(name: str, parent: int, number: int) -> Any:
        uids = SimpleNamespace(real=os.getuid())
        return SimpleNamespace(info={"name": name, "ppid": parent, "uids": uids, "pid": number})

    running = [process("raylet", 1, 71), process("raylet", 500, 72), process("bash", 1, 73)]
    monkeypatch.setattr(psutil, "process_iter", lambda _: iter(running))
    monkeypatch.setattr(health, "_size_of", lambda _: 9 * 2**30)
    found = named()
    assert "(processes 71)" in found["sessions"].message
    assert found["sessions"].fix.startswith("kill 71 ends it")
    assert "9.0 GiB" in found["session files"].message


def test_a_folder_that_ray_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", f"/tmp/{'long' * 20}")
    assert "too long a path" in named()["folder"].message


def test_too_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollcast_ray.machine.default_object_store", lambda: 2**20)
    found = named()["object store"]
    assert found.state == "problem"
    assert "--shm-size" in found.fix
