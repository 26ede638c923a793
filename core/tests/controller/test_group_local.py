"""Worker groups in this process: the same calls, errors and views as on Ray, with one rank."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle

import pytest
import torch
from controller_workers import PLACE, Closing, Counter, Fussy, Neighbour, NotAWorker, OnMesh, Probe, Refusal

from rollcast import ClassWithInitArgs, DataProto, ResourcePool, Worker, WorkerGroup, register
from rollcast.contracts.runtime import runtimes
from rollcast.errors import DispatchError, ResourceError, WorkerError
from rollcast.runtime.local import LocalRuntime


@pytest.fixture
def runtime():
    with LocalRuntime() as made:
        yield made


def make(runtime, cls, *args, pool=None, **options) -> WorkerGroup:
    roles = cls if isinstance(cls, dict) else ClassWithInitArgs(cls, *args)
    return WorkerGroup(pool or ResourcePool([1]), roles, runtime=runtime, **options)


def test_the_runtime_is_found_by_name() -> None:
    assert runtimes.get("local") is LocalRuntime


def test_calls_of_each_mode(runtime) -> None:
    group = make(runtime, Probe)
    assert group.echo(1, b=2) == [(0, (1,), {"b": 2})]
    assert group.add([3], y=[4]) == [7]
    assert group.only_first(5) == (0, 5)
    assert group.first_of_all(6) == (0, 6)
    assert group.waited(1) == [1]
    assert group.waited(2) == [2]


def test_async_methods_run_where_a_loop_already_runs(runtime) -> None:
    group = make(runtime, Probe)

    async def notebook() -> list[int]:
        return group.waited(3)

    assert asyncio.run(notebook()) == [3]


def test_a_call_that_does_not_block_gives_a_handle(runtime) -> None:
    group = make(runtime, Probe)
    handle = group.later(5)
    assert handle.get() == [5]
    assert handle.get() == [5]
    assert group.calls() == [1]
    assert group.echo(group.later(1))[0][1] == ([1],)


def test_the_group_shows_what_can_be_called(runtime) -> None:
    group = make(runtime, Probe, name="mine")
    assert {"echo", "spawn", "world_size"} <= set(dir(group))
    assert "seen_at_start" not in dir(group)
    assert repr(group) == "WorkerGroup('mine', role='worker', world_size=1)"
    assert repr(group.echo) == "<method echo of WorkerGroup('mine', role='worker', world_size=1)>"
    assert (group.echo.__name__, group.role, group.name) == ("echo", "worker", "mine")
    with pytest.raises(AttributeError, match=r"has no method 'ecko'; registered: .*echo"):
        group.ecko()


def test_a_method_is_called_by_the_name_it_is_bound_to(runtime) -> None:
    def implementation(self) -> str:
        return "called"

    class Renamed(Worker):
        answer = register(dispatch_mode="one_to_all")(implementation)

    assert make(runtime, Renamed).answer() == ["called"]


def test_unregistered_methods_are_not_offered_but_can_be_executed(runtime) -> None:
    class Quiet(Worker):
        def plain(self, x):
            return x

    group = make(runtime, Quiet)
    with pytest.raises(AttributeError, match="no method 'plain'"):
        group.plain(1)
    assert group.execute_all("plain", 1) == [1]
    assert group.execute_rank_zero("plain", 2) == 2


def test_roles_in_one_process_are_views_that_reach_each_other(runtime) -> None:
    group = make(
        runtime, {"counter": ClassWithInitArgs(Counter), "neighbour": ClassWithInitArgs(Neighbour)}, name="two"
    )
    with pytest.raises(DispatchError, match=r"hosts several roles \(counter, neighbour\)"):
        _ = group.role
    with pytest.raises(AttributeError, match=r"call it on a view: spawn\(\)\['counter'\].increase"):
        group.increase()
    views = group.spawn()
    assert views["counter"].increase() == [1]
    assert views["neighbour"].read_counter() == [1]
    assert views["neighbour"].others() == [(["counter"], ["counter", "neighbour"])]
    assert views["neighbour"].role_name() == ["neighbour"]
    assert views["counter"].workers == views["neighbour"].workers
    assert set(group.spawn(["neighbour"])) == {"neighbour"}
    assert repr(group) == "WorkerGroup('two', role='counter+neighbour', world_size=1)"
    with pytest.raises(DispatchError, match="two hosts no role 'critic'; it hosts counter, neighbour"):
        group.spawn(["critic"])
    views["counter"].shutdown()
    with pytest.raises(WorkerError, match="two is shut down; read_counter cannot be called"):
        views["neighbour"].read_counter()


def test_a_group_needs_a_role(runtime) -> None:
    with pytest.raises(ResourceError, match="at least one role"):
        make(runtime, {})


def test_an_error_names_everything(runtime) -> None:
    group = make(runtime, Probe, name="g")
    with pytest.raises(WorkerError) as caught:
        group.fail(0)
    error = caught.value
    assert str(error).startswith("g.worker.fail failed on rank 0 (node localhost): Refusal: rank 0 refuses")
    assert "WARNING probe: about to fail on 0" in str(error)
    assert (error.group, error.role, error.method, error.rank, error.node) == ("g", "worker", "fail", 0, "localhost")
    assert error.cause_type == "Refusal"
    assert isinstance(error.__cause__, Refusal)
    assert 'raise Refusal(f"rank {self.rank} refuses")' in error.remote_traceback
    assert any("Traceback on rank 0" in note for note in error.__notes__)
    clone = pickle.loads(pickle.dumps(error))
    assert (type(clone), str(clone), vars(clone)) == (WorkerError, str(error), vars(error))
    assert group.fail() == ["fine"]


def test_an_error_of_an_async_method_is_explained_too(runtime) -> None:
    with pytest.raises(WorkerError, match="Refusal: after a while"):
        make(runtime, Probe).fail_later()


def test_an_error_that_cannot_be_pickled_is_told_in_text(runtime) -> None:
    with pytest.raises(WorkerError, match="CannotTravel: no pickle holds me") as caught:
        make(runtime, Probe).fail_oddly()
    assert caught.value.__cause__ is None
    assert "CannotTravel" in caught.value.remote_traceback


def test_bad_arguments_name_the_method(runtime) -> None:
    group = make(runtime, Probe, name="g")
    with pytest.raises(DispatchError, match="all_to_all: argument 0") as caught:
        group.add(3)
    assert caught.value.__notes__ == ["in a call of <method add of WorkerGroup('g', role='worker', world_size=1)>"]


def test_a_constructor_that_raises(runtime) -> None:
    before = dict(os.environ)
    handlers = list(logging.getLogger().handlers)
    with pytest.raises(WorkerError, match=r"g\.worker\.__init__ failed on rank 0 .*: Refusal: not on rank 0"):
        make(runtime, Fussy, 0, name="g")
    assert dict(os.environ) == before
    assert logging.getLogger().handlers == handlers


def test_what_is_no_worker_is_refused(runtime) -> None:
    with pytest.raises(WorkerError, match=r"NotAWorker does not derive from rollcast\.Worker"):
        make(runtime, NotAWorker)


def test_more_than_one_rank_is_refused(runtime) -> None:
    with pytest.raises(ResourceError, match=r"one process, pool 'p' asks for 4; use another runtime; installed: "):
        make(runtime, Probe, pool=ResourcePool([2, 2], name="p"))


def test_environment_is_set_and_put_back() -> None:
    before = dict(os.environ)
    with LocalRuntime() as runtime:
        first = make(runtime, Probe, env={"ROLLCAST_TEST": "1"})
        second = make(runtime, Probe)
        seen = first.environment(*PLACE, "ROLLCAST_TEST")[0]
        assert {name: seen[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} == {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
        }
        assert seen["MASTER_ADDR"] == "127.0.0.1"
        assert int(seen["MASTER_PORT"]) > 0
        assert seen["ROLLCAST_TEST"] == "1"
        first.shutdown()
        assert os.environ["RANK"] == "0"
        second.shutdown()
        assert dict(os.environ) == before


def test_threads_are_told_to_the_worker(runtime) -> None:
    before = torch.get_num_threads()
    try:
        make(runtime, Probe, threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_workers_are_closed_once_and_all_of_them(runtime, tmp_path, caplog) -> None:
    file = tmp_path / "closed"
    roles = {
        "first": ClassWithInitArgs(Closing, str(file)),
        "second": ClassWithInitArgs(Closing, str(file), fails=True),
        "third": ClassWithInitArgs(Closing, str(file)),
    }
    group = make(runtime, roles)
    group.shutdown()
    group.shutdown()
    runtime.shutdown()
    assert file.read_text().split() == ["third", "second", "first"]
    assert "cannot close" in caplog.text


def test_a_restart_builds_the_workers_anew_and_keeps_the_views(runtime) -> None:
    group = make(runtime, {"counter": ClassWithInitArgs(Counter), "mesh": ClassWithInitArgs(OnMesh, 1)})
    views = group.spawn()
    assert [views["counter"].increase() for _ in range(2)] == [[1], [2]]
    mesh = views["mesh"].mesh("m")
    before = group.workers
    group.restart()
    assert group.workers != before
    assert views["counter"].workers == group.workers
    assert views["counter"].increase() == [1]
    assert views["mesh"].mesh("m") is not mesh
    views["mesh"].shutdown()
    with pytest.raises(WorkerError, match="is shut down; start a new group"):
        group.restart()


def test_a_restart_that_fails_closes_the_group_until_one_succeeds(runtime, monkeypatch) -> None:
    class Moody(Worker):
        broken = False

        def __init__(self) -> None:
            if self.broken:
                raise Refusal("not today")

        @register(dispatch_mode="one_to_all")
        def mood(self) -> str:
            return "fine"

    group = make(runtime, Moody, name="g")
    monkeypatch.setattr(Moody, "broken", True)
    with pytest.raises(WorkerError, match=r"g\.worker\.__init__ failed on rank 0 .*not today"):
        group.restart()
    with pytest.raises(WorkerError, match=r"g\.worker\.mood is refused: its restart has failed"):
        group.mood()
    monkeypatch.setattr(Moody, "broken", False)
    group.restart()
    assert group.poisoned == ""
    assert group.mood() == ["fine"]


def test_a_mesh_is_asked_for_once(runtime) -> None:
    group = make(runtime, OnMesh, 1)
    assert group.mesh("m") == group.with_timeout(5).mesh("m")
    assert (group.mesh("m")[0].dp_rank, group.mesh("m")[0].is_collect) == (0, True)
    assert group.times_asked() == [1]
    with pytest.raises(WorkerError, match=r"has no mesh 'other' \(registered: m\)"):
        group.mesh("other")


def test_nothing_is_copied(runtime) -> None:
    batch = DataProto.from_dict({"x": torch.arange(4)})
    assert make(runtime, Probe).addresses(batch) == [(batch["x"].data_ptr(), 6)]


def test_nodes_of_this_machine(runtime) -> None:
    (node,) = runtime.nodes()
    assert (node.address, node.cpus) == ("localhost", os.cpu_count())
    assert node.gpus == torch.cuda.device_count()


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_variables_that_say_where_a_rank_is_are_refused(runtime, name) -> None:
    wrapped = ClassWithInitArgs(Probe)
    says = rf"env of here sets {name}, which the runtime sets for each rank .*self\.rank"
    with pytest.raises(ResourceError, match=says):
        make(runtime, Probe, env={name: "3", "OTHER": "1"}, name="here")
    with pytest.raises(ResourceError, match=says):
        make(runtime, Probe, runtime_env={"env_vars": {name: "3"}}, name="here")
    for options in ({"env": {name: "3"}}, {"runtime_env": {"env_vars": {name: "3"}}}):
        with pytest.raises(ResourceError, match=says):
            make(runtime, {"a": wrapped.with_options(**options)}, name="here")
