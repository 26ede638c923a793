"""Views of several roles, calls by name, wishes of roles, and what the local runtime cannot do."""

from __future__ import annotations

import os
import pickle

import pytest
from controller_workers import Counter, Neighbour, OnMesh, Probe, Refusal

from rollcast import ClassWithInitArgs, ResourcePool, WorkerGroup
from rollcast.contracts.dispatch import MeshInfo
from rollcast.contracts.runtime import LaunchSpec
from rollcast.errors import DispatchError, ResourceError, WorkerError
from rollcast.runtime.local import LocalRuntime


@pytest.fixture
def runtime():
    with LocalRuntime() as made:
        yield made


@pytest.fixture
def three(runtime) -> WorkerGroup:
    roles = {
        "counter": ClassWithInitArgs(Counter),
        "neighbour": ClassWithInitArgs(Neighbour),
        "probe": ClassWithInitArgs(Probe),
    }
    return WorkerGroup(ResourcePool([1]), roles, runtime=runtime, name="three")


def test_fuse_is_the_inverse_of_spawn(three) -> None:
    views = three.spawn()
    whole = views["neighbour"].fuse()
    assert whole.roles == three.roles == ("counter", "neighbour", "probe")
    assert whole.workers == three.workers
    assert whole.spawn().keys() == views.keys()
    two = views["counter"].fuse(["probe", "counter"])
    assert two.roles == ("probe", "counter")
    assert repr(two) == "WorkerGroup('three', role='probe+counter', world_size=1)"
    assert two.fuse(["counter"]).role == "counter"
    with pytest.raises(DispatchError, match="three hosts no role 'critic'"):
        three.fuse(["critic"])
    with pytest.raises(DispatchError, match="a view of three needs a role"):
        three.fuse([])


def test_a_view_of_several_roles_has_each_by_name(three) -> None:
    assert three.counter.increase() == [1]
    assert three.neighbour.read_counter() == [1]
    assert {"counter", "neighbour"} <= set(dir(three))
    two = three.fuse(["counter", "neighbour"])
    assert two.counter.increase() == [2]
    with pytest.raises(AttributeError, match="probe"):
        _ = two.probe
    with pytest.raises(DispatchError, match=r"hosts several roles \(counter, neighbour\)"):
        two.execute_all("increase")
    with pytest.raises(AttributeError, match="has no method 'counter'"):
        _ = three.counter.counter


def test_deadlines_go_with_views(three) -> None:
    assert three.with_timeout(5).roles == three.roles
    assert three.counter.with_timeout(5).increase() == [1]


def test_calls_by_name(three) -> None:
    probe = three.probe
    assert probe.execute_all("waited", 2) == probe.execute_all_sync("waited", 2) == [2]
    assert probe.execute_rank_zero("waited", x=3) == probe.execute_rank_zero_sync("waited", x=3) == 3
    assert probe.execute_all_async("waited", 4).get() == [4]
    assert probe.execute_rank_zero_async("waited", 5).get() == 5
    failing = probe.execute_all_async("fail", 0)
    with pytest.raises(WorkerError, match=r"three\.probe\.fail failed on rank 0 .*Refusal") as caught:
        failing.get()
    assert isinstance(caught.value.__cause__, Refusal)


def test_functions_run_with_the_worker_or_with_its_neighbours(three) -> None:
    async def shifted(worker: Probe, by: int, *, roles: str = "x", function: str = "y") -> object:
        return worker.rank + by, roles, function

    assert three.probe.execute_func(shifted, 7) == [(7, "x", "y")]
    # Names of its own may be any.
    assert three.probe.execute_func_rank_zero(shifted, 8, roles="a", function="b") == (8, "a", "b")
    assert three.counter.increase() == [1]
    two = three.fuse(["counter", "probe"])
    assert two.execute_func(lambda workers: {role: type(w).__name__ for role, w in workers.items()}) == [
        {"counter": "Counter", "probe": "Probe"}
    ]
    assert two.execute_func_rank_zero(lambda workers, x: workers["counter"].count + x, 1) == 2


# -- wishes of roles --------------------------------------------------------------------------------


class Refusing(LocalRuntime):
    """Keeps the specification of the group and starts nothing."""

    spec: LaunchSpec

    def launch(self, pool, spec, timeout):
        self.spec = spec
        return []


def spec(*wishes, env=None, runtime_env=None) -> LaunchSpec:
    roles = {f"role{i}": ClassWithInitArgs(Probe).with_options(**wish) for i, wish in enumerate(wishes)}
    runtime = Refusing()
    WorkerGroup(ResourcePool([1]), roles, runtime=runtime, name="g", env=env, runtime_env=runtime_env)
    return runtime.spec


def test_wishes_of_roles_come_before_those_of_the_group() -> None:
    found = spec({"env": {"A": "1"}}, {"env": {"B": "2", "A": "1"}}, env={"A": "0", "C": "3"})
    assert found.env == {"A": "1", "B": "2", "C": "3"}
    found = spec(
        {"runtime_env": {"env_vars": {"A": "1"}, "pip": ["x"]}},
        {"runtime_env": {"env_vars": {"B": "2"}, "pip": ["x"]}},
        runtime_env={"env_vars": {"A": "0", "C": "3"}, "working_dir": "w"},
    )
    assert found.runtime_env == {
        "working_dir": "w",
        "pip": ["x"],
        "env_vars": {"A": "1", "B": "2", "C": "3"},
    }
    assert spec({}).runtime_env == {}
    assert spec({}).env == {}


def test_roles_of_one_process_have_to_agree() -> None:
    with pytest.raises(
        ResourceError, match=r"'role0' and 'role1' of g share a process, but want env A to be '1' and '2'"
    ):
        spec({"env": {"A": "1"}}, {"env": {"A": "2"}})
    with pytest.raises(ResourceError, match=r"want runtime_env pip to be \['x'\] and \['y'\]"):
        spec({"runtime_env": {"pip": ["x"]}}, {"runtime_env": {"pip": ["y"]}})
    with pytest.raises(ResourceError, match="want env_vars A"):
        spec({"runtime_env": {"env_vars": {"A": "1"}}}, {"runtime_env": {"env_vars": {"A": "2"}}})


def test_wishes_add_up_and_leave_the_original_alone() -> None:
    plain = ClassWithInitArgs(Probe, "label")
    wished = plain.with_options(env={"A": "1"}).with_options(env={"B": "2"}, runtime_env={"pip": ["x"]})
    assert (wished.env, wished.runtime_env) == ({"A": "1", "B": "2"}, {"pip": ["x"]})
    assert (plain.env, plain.runtime_env) == ({}, {})
    assert pickle.loads(pickle.dumps(wished)).env == wished.env
    assert wished().label == "label"


# -- the local runtime ------------------------------------------------------------------------------


def test_variables_of_roles_reach_this_process_and_leave_it(runtime) -> None:
    wrapped = ClassWithInitArgs(Probe).with_options(
        env={"ROLLCAST_A": "1"}, runtime_env={"env_vars": {"ROLLCAST_B": "2"}}
    )
    group = WorkerGroup(ResourcePool([1]), wrapped, runtime=runtime, env={"ROLLCAST_A": "0"})
    assert group.environment("ROLLCAST_A", "ROLLCAST_B") == [{"ROLLCAST_A": "1", "ROLLCAST_B": "2"}]
    group.shutdown()
    assert not {"ROLLCAST_A", "ROLLCAST_B"} & set(os.environ)


def test_what_one_process_cannot_do_is_refused(runtime) -> None:
    def build(**options) -> WorkerGroup:
        return WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Probe), runtime=runtime, name="g", **options)

    with pytest.raises(ResourceError, match="group 'g' cannot be detached: runtime 'local' ends with this process"):
        build(detached=True)
    with pytest.raises(ResourceError, match=r"runtime_env with pip, but runtime 'local'"):
        build(runtime_env={"pip": ["x"], "env_vars": {"A": "1"}})
    with pytest.raises(ResourceError, match="group 'g' cannot be found again: LocalRuntime has no detached groups"):
        WorkerGroup.attach("g", runtime=runtime)
    assert "A" not in os.environ


def test_contexts_say_where_ranks_stand(three) -> None:
    (context,) = three.contexts
    assert (context.rank, context.world_size, context.node, context.group) == (0, 1, "localhost", "three")


def test_what_a_bridge_to_another_framework_reads(runtime) -> None:
    group = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(OnMesh, 1), runtime=runtime, name="bridged")
    assert group.meshes == {}
    assert group.mesh("m") == group.meshes["m"] == [MeshInfo(0, True)]
    group.register_mesh("theirs", [MeshInfo(0, True, {"tp": 0})])
    assert group.mesh("theirs") == [MeshInfo(0, True, {"tp": 0})]
    assert group.times_asked() == [1]
    group.register_mesh("m", None)
    assert group.mesh("m") == [MeshInfo(0, True)]
    assert group.times_asked() == [2]
    with pytest.raises(DispatchError, match=r"'theirs' of bridged has 2 places, the group has 1 ranks"):
        group.register_mesh("theirs", [MeshInfo(0, True)] * 2)
    assert group.entries.keys() >= {"query_mesh", "times_asked"}
    entry = group.entries["times_asked"]
    assert (entry.dispatch_mode.name, entry.execute_mode.name, entry.blocking) == ("one_to_all", "all", True)
    assert group.times_asked.entry is entry


def test_a_handle_shows_the_references_behind_it(runtime) -> None:
    group = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Probe), runtime=runtime)
    handle = group.echo.remote(1)
    assert len(handle.refs) == 1
