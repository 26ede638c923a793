"""Pools and groups on a Ray of several nodes: placement, parts of pools, detached and nested groups, ends."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from placement_workers import Parent, Placed, Summing, Unwilling
from ray.cluster_utils import Cluster

from rollcast import ClassWithInitArgs, ResourcePool, ResourcePoolManager, WorkerGroup, start_groups
from rollcast.errors import ResourceError, WorkerError
from rollcast_ray import RayResourcePool, RayWorkerGroup, logs
from rollcast_ray.actors import find_detached
from rollcast_ray.runtime import RayRuntime

pytestmark = pytest.mark.long

#: Addresses of the nodes; the one with two CPUs was added first and comes second.
SMALL, LARGE = "127.0.0.11", "127.0.0.12"
STORE = 80 << 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without CPUs, and two nodes with two and one."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}.items():
            patch.setenv(key, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": STORE})
        large = {"num_cpus": 2, "num_gpus": 2, "resources": {"disk": 2, "accelerator_type:T1000": 1}}
        made.add_node(node_ip_address=LARGE, object_store_memory=STORE, **large)
        made.add_node(node_ip_address=SMALL, object_store_memory=STORE, num_cpus=1)
        yield made
        made.shutdown()


@pytest.fixture(scope="module")
def runtime(cluster) -> Iterator[RayRuntime]:
    assert not ray.is_initialized()
    with RayRuntime(address=cluster.address) as made:
        made.start()
        yield made
    assert not ray.is_initialized()


@pytest.fixture
def make(runtime) -> Iterator[Any]:
    """Builds groups, ends them, and looks whether anything is left."""
    made: list[WorkerGroup] = []

    def build(pool, roles=Placed, *args, **options) -> WorkerGroup:
        wrapped = roles if isinstance(roles, dict) else ClassWithInitArgs(roles, *args)
        made.append(WorkerGroup(pool, wrapped, runtime=runtime, **options))
        return made[-1]

    yield build
    pids = [host.info.pid for group in made for host in group.workers]
    for group in made:
        group.shutdown()
    assert gone(pids)
    assert reserved() == 0


def gone(pids: list[int]) -> bool:
    """Whether the processes end (they may take a moment)."""
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=60)
    return not alive


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def reserved() -> int:
    """Placement groups that hold or want resources."""
    return sum(group["state"] != "REMOVED" for group in ray.util.placement_group_table().values())


# -- places -----------------------------------------------------------------------------------------


def test_nodes_come_by_address_with_what_they_have_and_have_free(runtime) -> None:
    small, large = runtime.nodes()[:2]
    assert (small.address, small.cpus, small.gpus) == (SMALL, 1, 0)
    assert (large.address, large.cpus, large.gpus) == (LARGE, 2, 2)
    assert large.others == {"disk": 2, "accelerator_type:T1000": 1}
    assert large.free["CPU"] == 2


def test_unequal_counts_are_ranked_by_node(make) -> None:
    group = make(ResourcePool([2, 1]))
    assert group.node() == [SMALL, LARGE, LARGE]
    assert group.environment() == [
        ("0", "3", "0", "1", SMALL),
        ("1", "3", "0", "2", SMALL),
        ("2", "3", "1", "2", SMALL),
    ]
    assert [context.node for context in group.contexts] == group.node()
    assert [(context.local_rank, context.local_world_size) for context in group.contexts] == [(0, 1), (0, 2), (1, 2)]


def test_ranks_are_where_they_were_after_a_restart(make) -> None:
    places = []
    for _ in range(2):
        group = make(ResourcePool([1, 1]))
        places.append(group.node())
        group.shutdown()
    assert places == [[SMALL, LARGE]] * 2


@pytest.mark.parametrize("counts", [[1], [1, 1], [2, 1], [1, 2]])
def test_pools_are_placed_alike_each_time(runtime, counts) -> None:
    places = set()
    for _ in range(3):
        pool = RayResourcePool(counts)
        places.add(tuple(slot.node for slot in pool.get_slots(30)))
        pool.release()
    assert len(places) == 1
    # Where there is room, the nodes of a pool are different ones.
    assert len(set(places.pop())) == min(len(counts), 2)


def test_ranks_of_two_groups_of_places_on_one_node_count_on(make) -> None:
    group = make(ResourcePool([1, 1], resources={"disk": 1}))
    assert group.node() == [LARGE, LARGE]
    assert group.environment("LOCAL_RANK", "LOCAL_WORLD_SIZE") == [("0", "2"), ("1", "2")]


def test_pack_takes_several_nodes_where_it_must(make) -> None:
    with pytest.raises(ResourceError, match=r"asks for 3 processes on one node \(3 CPUs, 0 GPUs\)"):
        make(ResourcePool([3]))
    group = make(ResourcePool([3], strategy="PACK"))
    assert group.node() == [SMALL, LARGE, LARGE]
    assert group.environment("LOCAL_RANK", "LOCAL_WORLD_SIZE") == [("0", "1"), ("0", "2"), ("1", "2")]


def test_types_of_accelerators_and_custom_resources_choose_the_node(make) -> None:
    typed = make(ResourcePool([1], accelerator_type="T1000"))
    assert typed.node() == [LARGE]
    typed.shutdown()
    with pytest.raises(ResourceError) as caught:
        make(ResourcePool([1], accelerator_type="T2000"))
    assert f"node {LARGE}: 2 CPUs, 2 GPUs, 0 accelerator_type:T2000" in str(caught.value)
    with pytest.raises(ResourceError, match=f"ask for 3 disk, the cluster has 2.*node {SMALL}: 1 CPUs, 0 GPUs, 0 disk"):
        make(ResourcePool([1, 1, 1], resources={"disk": 1}))


def test_a_pool_that_finds_no_place_says_what_it_waits_for(make) -> None:
    held = RayResourcePool([2], name="held")
    held.get_slots(30)
    try:
        with pytest.raises(ResourceError) as caught:
            make(ResourcePool([1, 1], name="late"), launch_timeout=4.0)
    finally:
        held.release()
    message = str(caught.value)
    assert "pool 'late' ([1, 1] processes, each 1 CPUs, 0 GPUs) was not placed within 4 s" in message
    assert "it waits for 1 of 2 nodes, for 1 CPUs, 0 GPUs free on one node" in message
    assert f"node {LARGE}: 2 CPUs, 2 GPUs (free: 0 CPUs, 2 GPUs)" in message
    assert make(ResourcePool([1, 1])).node() == [SMALL, LARGE]


def test_a_pool_whose_nodes_are_taken_by_another_driver_goes_elsewhere(make) -> None:
    """This process does not know of the other pool, and would be where that one is."""
    taken = ray.util.placement_group([{"CPU": 1, f"node:{SMALL}": 0.001}])
    assert taken.wait(30)
    try:
        assert make(ResourcePool([1])).node() == [LARGE]
    finally:
        ray.util.remove_placement_group(taken)


# -- devices ----------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_groups_share_devices_by_fractions_up_to_a_count(make) -> None:
    pool = ResourcePool([2], use_gpu=True, max_colocate_count=2, name="shared")
    first, second = make(pool, name="first"), make(pool, name="second")
    assert first.device() == second.device() == [("0", 0), ("1", 0)]
    assert reserved() == 1
    with pytest.raises(
        ResourceError, match=r"pool 'shared' is full: first, second runs there.*max_colocate_count is 2"
    ):
        make(pool, name="third")
    first.shutdown()
    assert reserved() == 1
    assert second.device() == [("0", 0), ("1", 0)]


@pytest.mark.exhaustive
def test_workers_log_at_the_level_of_the_drivers_environment(make, monkeypatch) -> None:
    def level(**options: Any) -> tuple[int, int]:
        group = make(ResourcePool([1]), **options)
        found = group.log_level()[0]
        group.shutdown()
        return found

    assert level() == (logging.NOTSET, logging.WARNING)
    monkeypatch.setenv("ROLLCAST_LOGGING_LEVEL", "debug")
    assert level() == (logging.DEBUG, logging.WARNING)
    assert level(env={"ROLLCAST_LOGGING_LEVEL": "ERROR"}) == (logging.ERROR, logging.ERROR)
    with pytest.raises(WorkerError, match=r"ROLLCAST_LOGGING_LEVEL is 'loud'; it has to be DEBUG"):
        level(env={"ROLLCAST_LOGGING_LEVEL": "loud"})


@pytest.mark.exhaustive
def test_under_a_noset_switch_each_rank_finds_its_device_among_all(make) -> None:
    switch = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
    _, upper = ResourcePool([2], use_gpu=True, max_colocate_count=2).split(1)
    assert make(upper, runtime_env=switch).device() == [(None, 1)]


def test_hiding_the_device_that_ray_gave_is_told(make) -> None:
    with pytest.raises(WorkerError, match="Ray gave the process device 0, but its environment shows only 7"):
        make(ResourcePool([1], use_gpu=True), env={"CUDA_VISIBLE_DEVICES": "7"})


# -- parts of pools ---------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_parts_of_a_pool_share_its_placement(make) -> None:
    whole = ResourcePool([1, 2], name="whole", max_colocate_count=2)
    low, high = whole.split([1, 2])
    first, second = make(low), make(high)
    assert reserved() == 2
    assert first.node() == [SMALL]
    assert second.node() == [LARGE, LARGE]
    assert second.environment() == [("0", "2", "0", "2", LARGE), ("1", "2", "1", "2", LARGE)]
    assert make(whole).node() == [SMALL, LARGE, LARGE]
    first.shutdown()
    assert reserved() == 2
    assert second.node() == [LARGE, LARGE]


def test_merged_pools_are_one(make) -> None:
    left, right = ResourcePool([1], name="left", max_colocate_count=2), RayResourcePool([2], max_colocate_count=2)
    make(left)
    right.get_slots(30)
    group = make(left.merge(right))
    assert group.node() == [SMALL, LARGE, LARGE]
    assert [context.rank for context in group.contexts] == [0, 1, 2]
    group.shutdown()
    assert reserved() == 2  # left has another group, and right is the caller's
    right.release()


# -- roles and pools --------------------------------------------------------------------------------


def test_roles_are_split_over_pools_and_fused_within_them(make, runtime) -> None:
    manager = ResourcePoolManager({"big": [2], "small": [1]}, {"placed": "big", "sum": "big", "critic": "small"})
    roles = {
        "placed": ClassWithInitArgs(Placed, 5).with_options(env={"WHO": "placed"}),
        "critic": ClassWithInitArgs(Placed).with_options(runtime_env={"env_vars": {"WHO": "critic"}}),
        "sum": ClassWithInitArgs(Summing),
    }
    views = start_groups(manager, roles, runtime=runtime, name="run.")
    try:
        assert list(views) == ["placed", "critic", "sum"]
        assert views["sum"].workers == views["placed"].workers
        assert not set(views["critic"].pid()) & set(views["placed"].pid())
        assert (views["placed"].name, views["critic"].name) == ("run.big", "run.small")
        assert views["placed"].node() == [LARGE, LARGE]
        assert views["critic"].node() == [SMALL]
        assert views["sum"].neighbours_count() == [5, 5]
        assert views["placed"].environment("WHO") == [("placed",)] * 2
        assert views["critic"].environment("WHO") == [("critic",)]
    finally:
        for view in views.values():
            view.shutdown()
    assert reserved() == 0


def test_nothing_starts_unless_all_pools_fit_and_nothing_stays_if_one_fails(runtime) -> None:
    mapping = {"a": "one", "b": "two"}
    with pytest.raises(ResourceError, match=f"ask for 4 CPUs, the cluster has 3.*'one'.*'two'.*node {SMALL}: 1 CPUs"):
        start_groups(
            ResourcePoolManager({"one": [2], "two": [2]}, mapping),
            dict.fromkeys(mapping, ClassWithInitArgs(Placed)),
            runtime=runtime,
        )
    with pytest.raises(WorkerError, match=r"two\.b\.__init__ failed .*not today"):
        start_groups(
            ResourcePoolManager({"one": [1], "two": [1]}, mapping),
            {"a": ClassWithInitArgs(Placed), "b": ClassWithInitArgs(Unwilling)},
            runtime=runtime,
        )
    assert reserved() == 0


def test_functions_run_on_all_workers_and_across_roles(make) -> None:
    group = make(ResourcePool([2]), {"placed": ClassWithInitArgs(Placed, 3), "sum": ClassWithInitArgs(Summing)})
    offset = 100

    async def add(worker, more: int, *, factor: int = 1) -> int:
        return worker.rank * factor + worker.count + more + offset

    placed = group.placed
    assert placed.execute_func(add, 1, factor=10) == [104, 114]
    assert placed.execute_func_rank_zero(lambda worker: type(worker).__name__) == "Placed"
    assert (
        group.execute_func(lambda workers: (sorted(workers), workers["placed"].count)) == [(["placed", "sum"], 3)] * 2
    )
    waiting = placed.execute_all_async("increase")
    first = placed.execute_rank_zero_async("increase")
    assert first.get() == 5
    assert waiting.get() == [4, 4]
    assert placed.execute_all_sync("increase") == [6, 5]
    with pytest.raises(WorkerError, match=r"ZeroDivisionError"):
        placed.execute_func(lambda worker: 1 / 0)


# -- nodes ------------------------------------------------------------------------------------------


def test_an_address_of_another_cluster_than_the_one_that_runs_is_refused(runtime, cluster) -> None:
    RayRuntime(address=cluster.address).start()
    with pytest.raises(ResourceError, match=f"already joined Ray at {cluster.address}"):
        RayRuntime(address="127.0.0.1:1").start()


@pytest.mark.exhaustive
def test_the_last_output_of_a_process_comes_from_its_own_node(make, tmp_path: Path, monkeypatch) -> None:
    """The driver's machine has no file of that process, but one of another that has the same id."""
    group = make(ResourcePool([2], resources={"disk": 1}), name="far")
    pid = group.workers[1].info.pid
    (tmp_path / f"worker-{'0' * 56}-01000000-{pid}.err").write_text("not my words\n")
    monkeypatch.setattr(logs, "log_folder", lambda: tmp_path)
    with pytest.raises(WorkerError, match="process died") as caught:
        group.die_on(1)
    assert "last words of rank 1" in str(caught.value)
    assert "not my words" not in str(caught.value)


@pytest.mark.exhaustive
def test_a_group_is_restarted_elsewhere_after_its_node_is_lost(cluster, runtime) -> None:
    spare = {"num_cpus": 1, "object_store_memory": STORE, "resources": {"spare": 1}}
    lost = cluster.add_node(node_ip_address="127.0.0.13", **spare)
    pool = ResourcePool([1], resources={"spare": 1})
    group = WorkerGroup(pool, ClassWithInitArgs(Placed), runtime=runtime, name="moving")
    added = None
    try:
        assert group.node() == ["127.0.0.13"]
        cluster.remove_node(lost)
        assert wait_until(lambda: group.lost_ranks == [0])
        added = cluster.add_node(node_ip_address="127.0.0.14", **spare)
        group.restart()
        assert group.node() == ["127.0.0.14"]
    finally:
        group.shutdown()
        if added is not None:
            cluster.remove_node(added)
    assert reserved() == 0


# -- groups in workers ------------------------------------------------------------------------------


def test_a_worker_holds_a_group_of_its_own_that_ends_with_it(make) -> None:
    group = make(ResourcePool([1], name="outer"), Parent)
    (children,) = group.start_children(1)
    assert reserved() == 2
    assert group.ask_children() == [[1]]
    group.shutdown()
    assert gone(children)
    assert reserved() == 0


def test_a_group_that_is_given_to_a_worker_is_called_from_there(make) -> None:
    group, caller = make(ResourcePool([1])), make(ResourcePool([1]), Parent)
    assert caller.execute_func(lambda _, given: (given.increase(), given.node()), group) == [([1], group.node())]
    caller.shutdown()  # what the worker was given is not its own
    assert group.increase() == [2]


def test_what_a_killed_worker_held_ends_too(make) -> None:
    group = make(ResourcePool([1], name="outer"), Parent)
    (children,) = group.start_children(1)
    os.kill(group.workers[0].info.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="process died"):
        group.ask_children()
    group.shutdown()
    assert gone(children)
    assert reserved() == 0


# -- detached groups --------------------------------------------------------------------------------


def drive(cluster, script: str) -> str:
    """Run a driver of its own, and give what it prints."""
    code = f"from placement_workers import *\nfrom rollcast import *\n{textwrap.dedent(script)}"
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, "RAY_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.exhaustive
def test_a_detached_group_is_found_again_by_other_drivers(cluster, runtime) -> None:
    started = drive(
        cluster,
        """
        roles = {"placed": ClassWithInitArgs(Placed, 40), "sum": ClassWithInitArgs(Summing)}
        group = RayWorkerGroup(ResourcePool([2, 1]), roles, name="kept", detached=True)
        group.placed.execute_rank_zero("increase")
        print(group.placed.pid(), group.placed.node())
        """,
    )
    assert reserved() == 2
    group = WorkerGroup.attach("kept", runtime=runtime)
    assert (group.name, group.roles, group.world_size) == ("kept", ("placed", "sum"), 3)
    assert f"{group.placed.pid()} {group.placed.node()}" == started
    assert [context.node for context in group.contexts] == [SMALL, LARGE, LARGE]
    assert group.placed.increase() == [42, 41, 41]
    assert group.sum.neighbours_count() == [42, 41, 41]
    with pytest.raises(ResourceError, match="a detached group 'kept' runs already"):
        WorkerGroup(
            RayResourcePool([1], cpus_per_process=0, resources={"disk": 1}, detached=True),
            ClassWithInitArgs(Placed),
            runtime=runtime,
            name="kept",
            detached=True,
        )
    with pytest.raises(ResourceError, match="no detached group 'lost' runs here; detached groups: kept"):
        WorkerGroup.attach("lost", runtime=runtime)
    pids = group.placed.pid()
    ended = drive(
        cluster,
        """
        group = RayWorkerGroup.attach("kept")
        print(group.placed.increase())
        group.shutdown()
        """,
    )
    assert ended == "[43, 42, 42]"
    assert gone(pids)
    assert reserved() == 0
    group.shutdown()


def test_detached_groups_keep_the_places_that_they_share(runtime) -> None:
    pool = ResourcePool([1], max_colocate_count=2)
    groups = [
        WorkerGroup(pool, ClassWithInitArgs(Placed), runtime=runtime, name=name, detached=True) for name in ("a.1", "b")
    ]
    pids = [group.workers[0].info.pid for group in groups]
    other = RayRuntime()  # as another driver would, it knows of no pool
    again = [RayWorkerGroup.attach(name, runtime=other) for name in ("a.1", "b")]
    other.shutdown()
    assert [group.increase() for group in groups] == [[1], [1]]
    again = [RayWorkerGroup.attach(name, runtime=other) for name in ("a.1", "b")]
    again[0].shutdown()
    assert gone(pids[:1])
    assert again[1].increase() == [2]
    again[1].shutdown()
    assert gone(pids)
    for group in groups:
        group.shutdown()
    assert reserved() == 0
    assert not find_detached()


def test_a_detached_group_that_lost_a_rank_can_only_be_ended(runtime) -> None:
    group = WorkerGroup(
        ResourcePool([1, 1]), ClassWithInitArgs(Placed), runtime=runtime, name="hurt", detached=True, timeout=60
    )
    pids = group.pid()
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(WorkerError, match="process died"):
        group.increase()
    assert gone(pids[:1])
    other = RayRuntime()
    with pytest.raises(ResourceError, match=r"'hurt' has lost ranks \[0\] of 2; end the rest of it with"):
        WorkerGroup.attach("hurt", runtime=other)
    other.end_detached("hurt")
    assert gone(pids)
    group.shutdown()
    assert reserved() == 0
    with pytest.raises(ResourceError, match="no detached group 'hurt'"):
        other.end_detached("hurt")


def test_a_pool_that_ends_with_its_driver_holds_no_detached_group(runtime) -> None:
    pool = RayResourcePool([1], name="mine")
    pool.get_slots(30)
    with pytest.raises(ResourceError, match=r"pool 'mine' ends with this process.*detached=True"):
        WorkerGroup(pool, ClassWithInitArgs(Placed), runtime=runtime, name="stray", detached=True)
    pool.release()
    with pytest.raises(ResourceError, match="a detached group needs a name"):
        WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Placed), runtime=runtime, detached=True)
    assert reserved() == 0
