"""Starting a Ray of one's own, joining another one, and leaving either as it should be."""

from __future__ import annotations

import os
import pathlib

import psutil
import pytest
import ray
from controller_workers import Probe

from rollcast import ClassWithInitArgs, ResourcePool, WorkerGroup
from rollcast.contracts.runtime import LaunchSpec
from rollcast.errors import ResourceError
from rollcast_ray import runtime as ray_runtime
from rollcast_ray.machine import default_object_store, read_last_lines, require_reachable
from rollcast_ray.runtime import RayRuntime
from rollcast_ray.schemas import RayRuntimeConfig


@pytest.fixture(autouse=True)
def no_address(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert not ray.is_initialized()
    yield
    ray.shutdown()


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def test_an_embedded_ray_starts_and_ends_without_a_trace(monkeypatch, capfd) -> None:
    for key in ray_runtime._EMBEDDED_ENV:
        monkeypatch.delenv(key, raising=False)
    before = children()
    runtime = RayRuntime(num_cpus=3, object_store_memory=100 << 20)
    assert not ray.is_initialized()
    with runtime:
        (node,) = runtime.nodes()
        assert node.cpus == 3
        assert ray.cluster_resources()["object_store_memory"] == 100 << 20
        assert not set(ray_runtime._EMBEDDED_ENV) & set(os.environ)
        group = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Probe), runtime=runtime)
        assert group.place()[0]["rank"] == 0
        started = children() - before
        assert started
    assert not ray.is_initialized()
    runtime.shutdown()
    _, alive = psutil.wait_procs(list(started), timeout=60)
    assert not alive
    out, err = capfd.readouterr()
    assert "WARNING" not in out + err


@pytest.mark.parametrize("by_variable", [False, True], ids=["address", "RAY_ADDRESS"])
def test_a_ray_that_was_joined_is_left_running(monkeypatch, cluster, by_variable) -> None:
    if by_variable:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    with RayRuntime(address=None if by_variable else cluster.address, num_cpus=7) as runtime:
        (node,) = runtime.nodes()
        assert node.cpus == 2
        group = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Probe), runtime=runtime)
        pid = group.place()[0]["pid"]
    assert not ray.is_initialized()
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=60)
    assert not psutil.pid_exists(pid)
    require_reachable(cluster.address)


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 100 << 20})
    yield made
    made.shutdown()


def test_an_address_where_nobody_answers_is_an_error_that_helps(monkeypatch) -> None:
    with pytest.raises(ResourceError, match=r"cannot join Ray at 127\.0\.0\.1:1 .*ray start --head"):
        RayRuntime(address="127.0.0.1:1").start()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ResourceError, match="RAY_ADDRESS"):
        RayRuntime().nodes()


def test_only_addresses_with_a_port_are_tried() -> None:
    require_reachable("auto")
    require_reachable("local")
    with pytest.raises(OSError, match="refused"):
        require_reachable("ray://127.0.0.1:1")


def test_the_object_store_is_bounded() -> None:
    assert 0 < default_object_store() <= 4 << 30


def test_last_lines_of_a_process_leave_rays_marks_out(tmp_path: pathlib.Path) -> None:
    (tmp_path / "worker-aa-bb-12.err").write_text(
        ":job_id:01\n:actor_name:X\n" + "".join(f"line {i}\n" for i in range(30))
    )
    (tmp_path / "worker-aa-bb-12.out").write_text("said\n")
    (tmp_path / "worker-aa-bb-112.out").write_text("another process\n")
    assert read_last_lines(tmp_path, 12, 3) == ["line 28", "line 29", "said"]
    assert read_last_lines(tmp_path, 13) == []


def test_it_is_built_from_its_section(monkeypatch) -> None:
    settings = RayRuntimeConfig(
        address="here:1", object_store_memory=7, log_to_driver=True, runtime_env={"env_vars": {"A": "1", "B": "1"}}
    )
    runtime = RayRuntime.from_config(settings, processes=10_000)
    assert (runtime._address, runtime._num_cpus, runtime._object_store_memory) == ("here:1", 10_000, 7)
    assert RayRuntime.from_config(RayRuntimeConfig(num_cpus=3), processes=10_000)._num_cpus == 3
    spec = LaunchSpec("g", {}, runtime_env={"env_vars": {"B": "2"}, "working_dir": "w"})
    found = runtime._with_own_environment(spec).runtime_env
    assert found == {"env_vars": {"A": "1", "B": "2"}, "working_dir": "w"}


def test_processes_start_in_the_runtime_environment(monkeypatch) -> None:
    settings = RayRuntimeConfig(num_cpus=2, object_store_memory=100 << 20, runtime_env={"env_vars": {"A_KEY": "1"}})
    with RayRuntime.from_config(settings, processes=1) as runtime:
        group = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Probe), runtime=runtime)
        assert group.execute_func(lambda worker: __import__("os").environ.get("A_KEY")) == ["1"]
