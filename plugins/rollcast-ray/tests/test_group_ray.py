"""Worker groups on an embedded Ray: calls, views, failures, ends."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
import types
from collections.abc import Iterator

import psutil
import pytest
import ray
import torch
from controller_workers import (
    Closing,
    Counter,
    Fussy,
    Halves,
    Neighbour,
    OnMesh,
    Probe,
    Refusal,
    UsesMode,
)

from rollcast import ClassWithInitArgs, DataProto, ResourcePool, WorkerGroup
from rollcast.contracts.dispatch import RankCall, dispatch_modes
from rollcast.contracts.runtime import runtimes
from rollcast.errors import DispatchError, PluginError, ResourceError, WorkerError, WorkerTimeoutError
from rollcast_ray import RayResourcePool, RayWorkerGroup
from rollcast_ray.runtime import RayRuntime

CPUS = 4


@pytest.fixture(scope="module")
def runtime() -> Iterator[RayRuntime]:
    with RayRuntime(num_cpus=CPUS) as made:
        made.start()
        yield made
    assert not ray.is_initialized()


@pytest.fixture(scope="module")
def pool() -> ResourcePool:
    return ResourcePool([2], name="pair")


@pytest.fixture(scope="module")
def probes(runtime: RayRuntime, pool: ResourcePool) -> Iterator[WorkerGroup]:
    """Two ranks that no test harms; most of the pool is left to the other tests."""
    made = WorkerGroup(
        pool, ClassWithInitArgs(Probe, "shared"), runtime=runtime, name="probes", env={"ROLLCAST_TEST": "x"}
    )
    yield made
    made.shutdown()


@pytest.fixture
def make(runtime: RayRuntime):
    """Builds groups on two CPUs of their own, and ends them."""
    made: list[WorkerGroup] = []

    def build(cls, *args, size: int = 2, **options) -> WorkerGroup:
        roles = cls if isinstance(cls, dict) else ClassWithInitArgs(cls, *args)
        options.setdefault("name", "g")
        made.append(WorkerGroup(ResourcePool([size]), roles, runtime=runtime, **options))
        return made[-1]

    yield build
    for group in made:
        group.shutdown()


def gone(pids: list[int]) -> bool:
    """Whether the processes end (they may take a moment)."""
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(processes, timeout=60)
    return not alive


def bundles() -> int:
    """Placement groups that hold resources."""
    return sum(group["state"] == "CREATED" for group in ray.util.placement_group_table().values())


# -- calls ------------------------------------------------------------------------------------------


def test_the_runtime_is_found_by_name() -> None:
    assert runtimes.get("ray") is RayRuntime


def test_every_rank_knows_its_place(probes) -> None:
    places = probes.place()
    assert [place["rank"] for place in places] == [0, 1]
    assert [place["start"] for place in places] == [(0, 2, []), (1, 2, [])]
    pids = {place["pid"] for place in places}
    assert len(pids | {os.getpid()}) == 3
    assert [host.info.pid for host in probes.workers] == [place["pid"] for place in places]


def test_environment_is_that_of_torch_distributed(probes) -> None:
    first, second = probes.environment()
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    assert (first["LOCAL_RANK"], second["LOCAL_RANK"]) == ("0", "1")
    assert {first["WORLD_SIZE"], second["WORLD_SIZE"], first["LOCAL_WORLD_SIZE"]} == {"2"}
    assert first["MASTER_ADDR"] == second["MASTER_ADDR"] == probes.workers[0].info.node
    assert int(first["MASTER_PORT"]) == int(second["MASTER_PORT"]) > 0
    assert probes.environment("ROLLCAST_TEST") == [{"ROLLCAST_TEST": "x"}] * 2


def test_workers_of_an_embedded_ray_are_not_niced(probes) -> None:
    assert probes.niceness() == [os.nice(0)] * 2


def test_one_to_all_gives_all_the_same(probes) -> None:
    assert probes.echo("a", b=[1]) == [(0, ("a",), {"b": [1]}), (1, ("a",), {"b": [1]})]


def test_all_to_all_gives_each_its_own(probes) -> None:
    assert probes.add([1, 2], y=(10, 20)) == [11, 122]
    with pytest.raises(DispatchError, match="each of the 2 ranks"):
        probes.add([1, 2, 3])


def test_rank_zero_runs_alone(probes) -> None:
    assert probes.only_first(7) == (0, 7)
    assert probes.first_of_all(8) == (0, 8)


def test_results_of_ranks_that_do_not_answer_stay_where_they_are(probes) -> None:
    refs = probes.send("add", [(0, RankCall((1,))), (1, RankCall((2,)))], answering=[1])
    assert probes.receive("add", [0, 1], refs) == [None, 102]


def test_async_methods_share_a_loop(probes) -> None:
    assert probes.waited(1) == [1, 2]
    assert probes.waited(2) == [2, 3]


def test_calls_that_do_not_block_are_collected_later(probes) -> None:
    before = probes.calls()
    first, second = probes.later(10), probes.later(20)
    assert second.get() == [20, 21]
    assert first.get() == [10, 11]
    assert first.get() == [10, 11]
    assert probes.calls() == [count + 2 for count in before]
    assert probes.echo(probes.later(1))[1][1] == ([1, 2],)


def test_what_ranks_share_is_stored_once(probes, runtime, monkeypatch) -> None:
    stored = []
    put = runtime.put
    monkeypatch.setattr(runtime, "put", lambda value: stored.append(value) or put(value))
    batch = DataProto.from_dict({"x": torch.arange(1000)})
    assert [total for _, total in probes.addresses(batch)] == [499500, 499500]
    assert len(stored) == 1
    assert stored[0] is batch


def test_arguments_that_cannot_be_sent_are_refused(probes) -> None:
    with pytest.raises(DispatchError, match=r"argument of worker\.echo cannot be sent to a worker"):
        probes.echo(threading.Lock())
    assert probes.echo(1)[0] == (0, (1,), {})


# -- views and parts --------------------------------------------------------------------------------


def test_roles_share_processes_and_reach_each_other(make) -> None:
    group = make({"counter": ClassWithInitArgs(Counter), "neighbour": ClassWithInitArgs(Neighbour)})
    views = group.spawn()
    assert views["counter"].increase() == [1, 1]
    assert views["neighbour"].read_counter() == [1, 1]
    assert views["neighbour"].others() == [(["counter"], ["counter", "neighbour"])] * 2
    assert [place["pid"] for place in views["counter"].place()] == [
        host.info.pid for host in views["neighbour"].workers
    ]
    assert views["neighbour"].role_name() == ["neighbour", "neighbour"]


def test_a_mesh_is_asked_for_once(make) -> None:
    group = make(OnMesh, 2, size=2)
    assert [(place.dp_rank, place.is_collect) for place in group.mesh("m")] == [(0, True), (0, False)]
    group.with_timeout(60).mesh("m")
    assert group.times_asked() == [1, 1]


def test_a_mode_of_ones_own_splits_and_joins(make) -> None:
    out = make(UsesMode).double(DataProto.from_dict({"x": torch.arange(4)}))
    assert out["x"].tolist() == [0, 2, 4, 6]
    assert out["rank"].tolist() == [0, 0, 1, 1]


def test_parts_registered_in_process_travel_with_the_group_and_after_it(make) -> None:
    with dispatch_modes.temporarily("before", Halves()):
        group = make(UsesMode)
        assert group.find_mode("before") == ["Halves", "Halves"]
        with dispatch_modes.temporarily("after", Halves()):
            assert group.find_mode("after") == ["Halves", "Halves"]
        assert group.find_mode("after") == [None, None]
    assert group.find_mode("before") == [None, None]


def test_a_part_that_cannot_travel_says_so(probes) -> None:
    held = Halves()
    held.lock = threading.Lock()
    with (
        dispatch_modes.temporarily("held", held),
        pytest.raises(PluginError, match=r"plugin 'held' of rollcast\.dispatch_modes.* cannot be sent to workers"),
    ):
        probes.place()
    assert len(probes.place()) == 2


# -- failures ---------------------------------------------------------------------------------------


def test_an_error_of_one_rank_names_everything(probes) -> None:
    with pytest.raises(WorkerError) as caught:
        probes.fail(1)
    error = caught.value
    node = probes.workers[1].info.node
    assert str(error).startswith(f"probes.worker.fail failed on rank 1 (node {node}): Refusal: rank 1 refuses")
    assert "WARNING probe: about to fail on 1" in str(error)
    assert (error.group, error.role, error.method, error.rank, error.node) == ("probes", "worker", "fail", 1, node)
    assert error.cause_type == "Refusal"
    assert isinstance(error.__cause__, Refusal)
    assert "controller_workers.py" in error.remote_traceback
    clone = pickle.loads(pickle.dumps(error))
    assert (type(clone), str(clone), vars(clone)) == (WorkerError, str(error), vars(error))
    assert probes.fail() == ["fine", "fine"]


def test_the_first_cause_is_told_not_its_consequence(probes, tmp_path) -> None:
    with pytest.raises(WorkerError, match=r"rank 1 .*Refusal: the first cause"):
        probes.fail_in_order(str(tmp_path))


def test_errors_that_cannot_be_pickled_are_told_in_text(probes) -> None:
    with pytest.raises(WorkerError, match="CannotTravel: no pickle holds me") as caught:
        probes.fail_oddly()
    assert caught.value.__cause__ is None
    assert "raise CannotTravel" in caught.value.remote_traceback


def test_results_that_cannot_be_sent_are_told(probes) -> None:
    with pytest.raises(WorkerError, match=r"probes\.worker\.return_oddly failed on rank .*lock") as caught:
        probes.return_oddly()
    assert caught.value.cause_type == "TypeError"
    assert "process died" not in str(caught.value)


def test_a_method_that_does_not_exist_is_told(probes) -> None:
    with pytest.raises(WorkerError, match=r"AttributeError.*no_such_method"):
        probes.execute_all("no_such_method")


def test_a_killed_process_is_one_error_with_its_last_words(make) -> None:
    group = make(Probe)
    with pytest.raises(WorkerError, match=r"g\.worker\.die failed on rank 1 .*process died") as caught:
        group.die(1)
    assert (caught.value.rank, caught.value.cause_type) == (1, "ProcessDied")
    assert "last words" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(WorkerError, match=r"rank 1 .*process died"):
        group.place()


@pytest.mark.exhaustive
def test_a_deadline_is_an_error_that_names_the_late_rank(make) -> None:
    group = make(Probe)
    with pytest.raises(
        WorkerTimeoutError, match=r"g\.worker\.sleep failed on rank 1 .*within 3 s from 1 of 2"
    ) as caught:
        group.with_timeout(3.0).sleep(1, 6.0)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.rank == 1
    with pytest.raises(WorkerError, match=r"place is refused: worker\.sleep passed its deadline"):
        group.place()
    group.restart()
    assert len(group.place()) == 2


def test_a_constructor_that_raises_is_told_and_leaves_nothing(make) -> None:
    before = bundles()
    with pytest.raises(WorkerError, match=r"g\.worker\.__init__ failed on rank 1 .*Refusal: not on rank 1") as caught:
        make(Fussy, 1)
    assert "controller_workers.py" in caught.value.remote_traceback
    assert bundles() == before


def test_a_class_that_workers_cannot_import_is_told(make) -> None:
    nowhere = types.ModuleType("nowhere_to_import")
    sys.modules["nowhere_to_import"] = nowhere
    try:
        nowhere.Homeless = type("Homeless", (Probe,), {"__module__": "nowhere_to_import"})
        with pytest.raises(WorkerError, match="No module named 'nowhere_to_import'") as caught:
            make(nowhere.Homeless)
    finally:
        del sys.modules["nowhere_to_import"]
    assert caught.value.cause_type == "ModuleNotFoundError"


def test_constructor_arguments_that_cannot_be_sent_are_refused(make) -> None:
    with pytest.raises(DispatchError, match="classes or arguments of g cannot be sent"):
        make(Probe, threading.Lock())


# -- places -----------------------------------------------------------------------------------------


def test_a_pool_that_no_node_holds_is_refused_with_the_numbers(make) -> None:
    with pytest.raises(ResourceError, match=r"asks for 9 processes on one node \(9 CPUs, 0 GPUs\).*: 4 CPUs, 0 GPUs"):
        make(Probe, size=9)


def test_a_gpu_that_is_not_there_is_refused_with_the_numbers(runtime) -> None:
    with pytest.raises(ResourceError, match=r"2 GPUs\), but no node has them"):
        WorkerGroup(ResourcePool([2], use_gpu=True), ClassWithInitArgs(Probe), runtime=runtime)


def test_pools_that_do_not_fit_beside_each_other_are_refused_at_once(make, probes) -> None:
    with pytest.raises(ResourceError, match="the pools ask for 5 CPUs, the cluster has 4"):
        make(Probe, size=3)


def test_a_pool_that_waits_for_others_in_vain_is_told_what_is_free(make, probes) -> None:
    taken = RayResourcePool([2], name="taken")
    taken.get_placement_groups()
    try:
        with pytest.raises(
            ResourceError, match=r"not placed within 1 s; .*1 CPUs, 0 GPUs free on one node.*: 4 CPUs.*\(free: 0 CPUs"
        ):
            make(Probe, size=1, launch_timeout=1.0)
    finally:
        taken.release()
    assert len(make(Probe, size=1).place()) == 1


def test_the_whole_timeout_is_named_when_a_part_of_it_is_over(runtime) -> None:
    runtime.nodes()
    with pytest.raises(ResourceError, match="not placed within 7 s"):
        RayResourcePool([99]).get_slots(timeout=7.0, deadline=time.monotonic() + 0.2)


def test_groups_may_share_a_pool(runtime) -> None:
    pool = ResourcePool([1], max_colocate_count=2)
    first = WorkerGroup(pool, ClassWithInitArgs(Probe), runtime=runtime)
    before = bundles()
    second = WorkerGroup(pool, ClassWithInitArgs(Probe), runtime=runtime)
    assert bundles() == before
    first.shutdown()
    assert len(second.place()) == 1
    second.shutdown()
    assert bundles() == before - 1


def test_a_pool_that_the_caller_placed_stays_the_callers(runtime) -> None:
    pool = RayResourcePool([1], name="mine")
    pool.get_placement_groups()
    before = bundles()
    WorkerGroup(pool, ClassWithInitArgs(Probe), runtime=runtime).shutdown()
    assert bundles() == before
    pool.release()
    assert bundles() == before - 1


def test_a_group_without_a_runtime_joins_the_ray_that_runs_here(probes) -> None:
    group = RayWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Probe))
    try:
        assert len(group.place()) == 1
    finally:
        RayRuntime.shared().shutdown()
    assert ray.is_initialized()
    assert len(probes.place()) == 2


# -- ends -------------------------------------------------------------------------------------------


def test_shutdown_closes_workers_and_ends_their_processes(make, tmp_path, caplog) -> None:
    file = tmp_path / "closed"
    group = make(
        {"fine": ClassWithInitArgs(Closing, str(file)), "failing": ClassWithInitArgs(Closing, str(file), True)}
    )
    pids = [host.info.pid for host in group.workers]
    group.shutdown()
    group.shutdown()
    assert sorted(file.read_text().split()) == ["failing", "failing", "fine", "fine"]
    assert caplog.text.count("cannot close") >= 2
    assert gone(pids)
    with pytest.raises(WorkerError, match="g is shut down; touch cannot be called"):
        group.spawn()["fine"].touch()


def test_a_rank_that_never_answers_does_not_hold_up_the_end(make) -> None:
    group = make(Probe, size=1)
    pids = [host.info.pid for host in group.workers]
    with pytest.raises(WorkerTimeoutError):
        group.with_timeout(0.2).sleep(0, 600.0)
    group.shutdown()
    assert gone(pids)


def test_a_group_is_attached_to_by_the_handles_of_its_actors(probes: WorkerGroup) -> None:
    handles = [worker.handle for worker in probes.workers]
    other = RayRuntime()
    try:
        group = RayWorkerGroup.from_actors(handles[::-1], Probe, runtime=other)
        assert (group.name, group.world_size) == ("probes", 2)
        assert group.place() == probes.place()
        for wrong in (handles[:1], handles[:1] * 2, []):
            with pytest.raises(ResourceError, match=r"the actors are ranks .* give all \d ranks of one group"):
                RayWorkerGroup.from_actors(wrong, Probe, runtime=other)
        with pytest.raises(ResourceError, match="no actor 'nobody' runs in the namespace"):
            RayWorkerGroup.from_actors(["nobody"], Probe, runtime=other)
    finally:
        other.shutdown()  # leaves the group to whoever started it
    assert len(probes.place()) == 2
