"""Starting a Ray of one's own, joining another one, and leaving either as it should be."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from controller_workers import Probe
from packaging.requirements import Requirement

from rollcast import ClassWithInitArgs, ResourcePool, WorkerGroup
from rollcast.contracts.runtime import HostInfo, LaunchSpec
from rollcast.errors import ResourceError, WorkerError
from rollcast_ray import embedded, liveness, machine, ray_internals
from rollcast_ray.actors import _build_contexts
from rollcast_ray.logs import read_last_lines
from rollcast_ray.machine import default_object_store, require_reachable, require_same_cluster
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
    for key in embedded._ENVIRONMENT:
        monkeypatch.delenv(key, raising=False)
    before = children()
    runtime = RayRuntime(num_cpus=3, object_store_memory=100 << 20)
    assert not ray.is_initialized()
    with runtime:
        (node,) = runtime.nodes()
        assert node.cpus == 3
        assert ray.cluster_resources()["object_store_memory"] == 100 << 20
        assert not set(embedded._ENVIRONMENT) & set(os.environ)
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
@pytest.mark.cases(1)
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
    assert 0 < default_object_store() <= psutil.virtual_memory().total * 0.3


def test_the_object_store_follows_the_memory_of_the_machine(monkeypatch) -> None:
    monkeypatch.setattr(machine, "_memory_limit", lambda: 1 << 30)
    small = default_object_store()
    monkeypatch.setattr(machine, "_memory_limit", lambda: 1 << 50)
    assert small == int(0.3 * (1 << 30))
    shared = os.statvfs("/dev/shm")
    assert default_object_store() == int(shared.f_bavail * shared.f_frsize * 0.9)


@pytest.mark.parametrize("address", ["auto", "local", "10.0.0.1:6379", "ray://elsewhere:10001"])
def test_an_address_of_the_cluster_that_runs_is_accepted(address: str) -> None:
    require_same_cluster(address, "10.0.0.1:6379")


@pytest.mark.parametrize("address", ["10.0.0.2:6379", "10.0.0.1:6380", "10.0.0.1"])
def test_an_address_of_another_cluster_than_the_one_that_runs_is_refused(address: str) -> None:
    with pytest.raises(ResourceError, match=rf"is {address}, but .*already joined Ray at 10\.0\.0\.1:6379"):
        require_same_cluster(address, "10.0.0.1:6379")


def test_threads_follow_the_cores_of_each_node() -> None:
    spec = LaunchSpec("g", {})
    infos = [HostInfo("big", 1, 1, cores=64), HostInfo("small", 2, 2, cores=4), HostInfo("small", 3, 3, cores=4)]
    contexts = _build_contexts(["a", "b", "b"], spec, infos)
    assert [context.threads for context in contexts] == [64, 2, 2]
    fixed = _build_contexts(["a", "b", "b"], replace(spec, threads=3), infos)
    assert [context.threads for context in fixed] == [3, 3, 3]


def test_names_of_ray_that_are_private_are_used_in_one_module_and_exist() -> None:
    folder = pathlib.Path(ray_internals.__file__).parent
    private = re.compile(r"ray\._private|ray\._raylet|\._actor_id\b|\.task_id\(\)")
    assert {file.name for file in folder.glob("*.py") if private.search(file.read_text())} == {"ray_internals.py"}
    for name in ray_internals.__all__:
        assert getattr(ray_internals, name) is not None
    assert importlib.util.find_spec(ray_internals.AUTHENTICATION_LOGGER) is not None
    requirement = next(
        parsed for text in importlib.metadata.requires("rollcast-ray") if (parsed := Requirement(text)).name == "ray"
    )
    assert ray.__version__ in requirement.specifier
    assert any(part.operator in ("<", "<=") for part in requirement.specifier)


def test_last_lines_of_a_process_leave_rays_marks_out(tmp_path: pathlib.Path) -> None:
    (tmp_path / "worker-aa-bb-12.err").write_text(
        ":job_id:01\n:actor_name:X\n" + "".join(f"line {i}\n" for i in range(30))
    )
    (tmp_path / "worker-aa-bb-12.out").write_text("said\n")
    (tmp_path / "worker-aa-bb-112.out").write_text("another process\n")
    (tmp_path / "worker-cc-bb-12.out").write_text("a process of another container\n")
    assert read_last_lines(tmp_path, "aa", 12, 3) == ["line 28", "line 29", "said"]
    assert read_last_lines(tmp_path, "aa", 13) == []


def test_it_is_built_from_its_section(monkeypatch) -> None:
    settings = RayRuntimeConfig(
        address="here:1",
        object_store_memory=7,
        log_to_driver=True,
        runtime_env={"env_vars": {"A": "1", "B": "1"}},
        stop_grace_s=0.5,
        include_dashboard=True,
    )
    runtime = RayRuntime.from_config(settings, processes=10_000)
    assert runtime._include_dashboard
    assert (runtime._address, runtime._num_cpus, runtime._object_store_memory) == ("here:1", 10_000, 7)
    assert runtime._stop_grace_s == 0.5
    assert RayRuntime.from_config(RayRuntimeConfig(num_cpus=3), processes=10_000)._num_cpus == 3
    spec = LaunchSpec("g", {}, runtime_env={"env_vars": {"B": "2"}, "working_dir": "w"})
    found = runtime._with_own_environment(spec).runtime_env
    assert found == {"env_vars": {"A": "1", "B": "2"}, "working_dir": "w"}


@pytest.mark.parametrize("installed", [True, False])
def test_the_dashboard_of_an_embedded_ray(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens on the loopback address, and is refused by its key where it is not installed."""
    started: dict[str, Any] = {}

    def init(**options: Any) -> Any:
        started.update(options)
        return SimpleNamespace(dashboard_url="127.0.0.1:8265")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(embedded.ray, "init", init)
    monkeypatch.setattr(embedded, "started_processes", dict)
    monkeypatch.setattr(embedded.atexit, "register", lambda function: None)
    if not installed:
        with pytest.raises(ResourceError, match=r"runtime.include_dashboard is true, .*ray\[default\]"):
            embedded.EmbeddedRay().start(1, 1 << 20, False, True)
        return
    embedded.EmbeddedRay().start(1, 1 << 20, False, True)
    assert (started["include_dashboard"], started["dashboard_host"]) == (True, "127.0.0.1")
    embedded.EmbeddedRay().start(1, 1 << 20, False)
    assert started["include_dashboard"] is False


def test_processes_start_in_the_runtime_environment(monkeypatch) -> None:
    settings = RayRuntimeConfig(num_cpus=2, object_store_memory=100 << 20, runtime_env={"env_vars": {"A_KEY": "1"}})
    with RayRuntime.from_config(settings, processes=1) as runtime:
        group = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Probe), runtime=runtime)
        assert group.execute_func(lambda worker: __import__("os").environ.get("A_KEY")) == ["1"]


@pytest.mark.exhaustive
def test_a_runtime_starts_anew_after_the_users_own_shutdown_of_ray(monkeypatch) -> None:
    monkeypatch.setattr(liveness, "_LOOK_S", 0.02)
    started = []
    init = ray.init
    monkeypatch.setattr(ray, "init", lambda *args, **kwargs: started.append(args) or init(*args, **kwargs))
    runtime, pool = RayRuntime(num_cpus=2, object_store_memory=100 << 20), ResourcePool([1])
    first = WorkerGroup(pool, ClassWithInitArgs(Probe), runtime=runtime, name="first")
    watch = runtime._liveness._thread
    assert watch is not None
    ray.shutdown()
    watch.join(60.0)
    assert not watch.is_alive()
    assert not ray.is_initialized()
    assert len(started) == 1
    assert first.lost_ranks == [0]
    with pytest.raises(WorkerError, match=r"first\.worker\.place failed on rank 0 .*the Ray .* was shut down"):
        first.place()
    # The user starts Ray again; the pool holds nothing of the first session, and the new ranks are watched.
    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, logging_level="ERROR")
    try:
        second = WorkerGroup(pool, ClassWithInitArgs(Probe), runtime=runtime, name="second")
        (place,) = second.place()
        first.shutdown()
        assert second.place() == [place]
        assert (first.lost_ranks, second.lost_ranks) == ([0], [])
        psutil.Process(place["pid"]).kill()
        deadline = time.monotonic() + 60.0
        while not second.lost_ranks and time.monotonic() < deadline:
            time.sleep(0.05)
        assert second.lost_ranks == [0]
        runtime.shutdown()
        assert ray.is_initialized()  # the user's own
    finally:
        ray.shutdown()


def test_a_class_that_is_an_actor_already_is_refused_before_anything_starts() -> None:
    for actor in (ray.remote(Probe), ray.remote(num_cpus=1)(Probe)):
        with pytest.raises(TypeError, match=r"takes a plain worker class, not .*Probe.* remove the decorator"):
            ClassWithInitArgs(actor)
    with pytest.raises(TypeError, match="takes a plain worker class, not <function"):
        ClassWithInitArgs(lambda: Probe())
