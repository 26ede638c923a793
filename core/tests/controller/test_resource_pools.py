"""Pools, who lives in which, and which of them a cluster can never hold."""

from __future__ import annotations

import itertools
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcast import ClassWithInitArgs, ResourcePool, ResourcePoolManager, Worker, start_groups
from rollcast.contracts.pools import NodeResources
from rollcast.contracts.runtime import RuntimeCapabilities
from rollcast.controller.placement import Share, plan_nodes
from rollcast.errors import ResourceError, WorkerError
from rollcast.runtime.local import LocalRuntime


def check_resources(pools, nodes) -> None:
    ResourcePoolManager({f"pool{number}": pool for number, pool in enumerate(pools)}, {}).check(nodes)


def test_ranks_of_a_pool() -> None:
    pool = ResourcePool([2, 3], name="p")
    assert pool.world_size == 5
    assert pool.local_rank_list() == [0, 1, 0, 1, 2]
    assert pool.local_world_size_list() == [2, 2, 3, 3, 3]
    assert repr(pool) == "ResourcePool([2, 3], cpu, name='p')"


@pytest.mark.parametrize("counts", [[], [0], [2, -1]])
def test_every_node_needs_a_process(counts) -> None:
    with pytest.raises(ResourceError, match=r"pool 'p': process_on_nodes is \["):
        ResourcePool(counts, name="p")


def test_colocation_needs_a_group() -> None:
    with pytest.raises(ResourceError, match="max_colocate_count is 0"):
        ResourcePool([1], max_colocate_count=0)


def test_manager_finds_the_pool_of_a_role() -> None:
    manager = ResourcePoolManager({"big": [2], "small": [1]}, {"actor": "big", "ref": "big", "reward": "small"})
    assert manager.get_resource_pool("ref") is manager.get_resource_pool("actor")
    assert manager.get_resource_pool("reward").world_size == 1
    assert manager.roles_by_pool() == {"big": ["actor", "ref"], "small": ["reward"]}
    with pytest.raises(ResourceError, match="role critic has no pool; placed roles: actor, ref, reward"):
        manager.get_resource_pool("critic")


def test_manager_refuses_an_undefined_pool() -> None:
    with pytest.raises(
        ResourceError, match="role actor is placed in pool 'big', which is not defined; defined pools: small"
    ):
        ResourcePoolManager({"small": [1]}, {"actor": "big"})


def test_the_numbers_are_said_for_one_node() -> None:
    nodes = [NodeResources("10.0.0.1", 8, 2), NodeResources("10.0.0.2", 4, 0)]
    with pytest.raises(ResourceError) as caught:
        ResourcePoolManager({"actor_pool": [4]}, {}, use_gpu=True).check(nodes)
    message = str(caught.value)
    for part in ("'actor_pool'", "4 processes", "4 GPUs", "10.0.0.1: 8 CPUs, 2 GPUs", "10.0.0.2: 4 CPUs, 0 GPUs"):
        assert part in message
    assert "placement.n_gpus_per_node" in message


def test_the_numbers_are_said_for_all_pools() -> None:
    nodes = [NodeResources("a", 4, 0)]
    check_resources([ResourcePool([4])], nodes)
    with pytest.raises(ResourceError, match="the pools ask for 5 CPUs, the cluster has 4") as caught:
        check_resources([ResourcePool([2], name="one"), ResourcePool([3], name="two")], nodes)
    assert "'one'" in str(caught.value)
    assert "'two'" in str(caught.value)


def test_enough_in_all_is_not_enough_on_each_node() -> None:
    nodes = [NodeResources("a", 5, 0), NodeResources("b", 3, 0)]
    with pytest.raises(ResourceError, match="ask 2 times for 4 or more CPUs on one node, the cluster has room for 1"):
        check_resources([ResourcePool([4, 4])], nodes)
    with pytest.raises(ResourceError, match="has no node"):
        check_resources([ResourcePool([1])], [])


shares = st.lists(
    st.tuples(st.lists(st.integers(1, 4), min_size=1, max_size=2), st.booleans(), st.sampled_from([0.5, 1.0, 2.0])),
    min_size=1,
    max_size=2,
)
clusters = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4)), min_size=1, max_size=3)


@settings(deadline=None, max_examples=200)
@given(shares=shares, cluster=clusters)
def test_what_fits_is_never_refused(shares, cluster) -> None:
    pools = [ResourcePool(counts, use_gpu=gpu, cpus_per_process=cpus) for counts, gpu, cpus in shares]
    nodes = [NodeResources(f"n{i}", cpus, gpus) for i, (cpus, gpus) in enumerate(cluster)]
    wanted = [
        (count * pool.cpus_per_process, count if pool.use_gpu else 0)
        for pool in pools
        for count in pool.process_on_nodes
    ]

    def holds(places) -> bool:
        return all(
            sum(cpus for (cpus, _), place in zip(wanted, places, strict=True) if place == i) <= node.cpus
            and sum(gpus for (_, gpus), place in zip(wanted, places, strict=True) if place == i) <= node.gpus
            for i, node in enumerate(nodes)
        )

    fits = any(holds(places) for places in itertools.product(range(len(nodes)), repeat=len(wanted)))
    try:
        check_resources(pools, nodes)
    except ResourceError:
        assert not fits


@given(count=st.integers(1, 16), capacity=st.integers(0, 16))
def test_on_one_node_it_is_exact(count, capacity) -> None:
    fits = True
    try:
        check_resources([ResourcePool([count])], [NodeResources("n", capacity, 0)])
    except ResourceError:
        fits = False
    assert fits == (count <= capacity)


# -- options ----------------------------------------------------------------------------------------


def test_a_process_reserves_what_its_pool_says() -> None:
    pool = ResourcePool(
        [1], use_gpu=True, cpus_per_process=2, accelerator="NPU", accelerator_type="910B", resources={"disk": 0.5}
    )
    assert pool.bundle() == {"CPU": 2, "NPU": 1, "accelerator_type:910B": 0.001, "disk": 0.5}
    assert repr(pool) == "ResourcePool([1], npu, name='pool')"
    assert ResourcePool([1], use_gpu=True, cpus_per_process=0).bundle() == {"GPU": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "SPREAD"}, "strategy is 'SPREAD'; valid: STRICT_PACK, PACK"),
        ({"cpus_per_process": -1}, "cpus_per_process is -1"),
        ({"cpus_per_process": 0}, "needs something of its node"),
        ({"resources": {"GPU": 1}}, "resources names 'GPU'; use .*use_gpu"),
        ({"resources": {"NPU": 1}, "accelerator": "NPU"}, "resources names 'NPU'"),
        ({"resources": {"disk": 0}}, r"resources\['disk'\] is 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message) -> None:
    with pytest.raises(ResourceError, match=rf"pool 'pool': .*{message}"):
        ResourcePool([1], **options)


# -- parts ------------------------------------------------------------------------------------------


def test_parts_are_consecutive_and_know_their_nodes() -> None:
    pool = ResourcePool([2, 3], name="p", max_colocate_count=2)
    one, two, three = pool.split([1, 2, 2])
    assert [part.world_size for part in (one, two, three)] == [1, 2, 2]
    assert two.process_on_nodes == (1, 1)
    assert two.local_rank_list() == [0, 0]
    assert two.places() == [(pool, 1), (pool, 2)]
    assert (two.name, two.max_colocate_count) == ("p[1:3]", 2)
    assert [part.name for part in ResourcePool([4], name="q").split(2)] == ["q[0:2]", "q[2:4]"]


@pytest.mark.parametrize("sizes", [0, -1, 3, 8, [], [2], [2, 3], [4, 0], [5, -1]])
def test_parts_have_to_add_up(sizes) -> None:
    with pytest.raises(ResourceError, match=r"pool 'p' has 4 processes; parts of .* do not add up"):
        ResourcePool([4], name="p").split(sizes)


@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_split_and_merge_undo_each_other(counts, data) -> None:
    pool = ResourcePool(counts)
    cuts = data.draw(st.sets(st.integers(1, max(1, pool.world_size - 1)), max_size=3)) if pool.world_size > 1 else set()
    edges = [0, *sorted(cuts), pool.world_size]
    parts = pool.split([after - before for before, after in itertools.pairwise(edges)])
    whole = parts[0].merge(*parts[1:])
    assert whole.places() == pool.places()
    assert whole.process_on_nodes == pool.process_on_nodes
    again = whole.split([part.world_size for part in parts])
    assert [part.places() for part in again] == [part.places() for part in parts]


def test_pools_that_cannot_be_one_are_refused() -> None:
    pool = ResourcePool([2], name="a")
    with pytest.raises(ResourceError, match="a process twice"):
        pool.merge(pool.split(1)[0])
    with pytest.raises(ResourceError, match=r"different use_gpu cannot be one: \{'a': False, 'b': True\}"):
        pool.merge(ResourcePool([2], use_gpu=True, name="b"))
    with pytest.raises(ResourceError, match="different max_colocate_count"):
        pool.merge(ResourcePool([2], max_colocate_count=2, name="b"))


def test_a_pool_and_its_parts_are_counted_once() -> None:
    pool = ResourcePool([2])
    nodes = [NodeResources("a", 2, 0)]
    check_resources([pool, *pool.split(1)], nodes)
    with pytest.raises(ResourceError, match="ask for 4 CPUs"):
        check_resources([pool, ResourcePool([2])], nodes)


# -- what nodes can give ----------------------------------------------------------------------------


def test_the_check_knows_custom_resources_and_what_is_free() -> None:
    nodes = [NodeResources("a", 4, 0, {"disk": 2}, free={"CPU": 1, "disk": 2}), NodeResources("b", 4, 0)]
    manager = ResourcePoolManager({"p": ResourcePool([2], name="p", resources={"disk": 1})}, {"actor": "p"})
    manager.check(nodes)
    with pytest.raises(ResourceError) as caught:
        manager.check(nodes, now=True)
    assert "asks for 2 processes on one node (2 CPUs, 0 GPUs, 2 disk), but no node has them free" in str(caught.value)
    assert "node a: 4 CPUs, 0 GPUs, 2 disk (free: 1 CPUs, 0 GPUs, 2 disk); node b: 4 CPUs" in str(caught.value)


def test_processes_of_a_packed_pool_may_lie_apart() -> None:
    nodes = [NodeResources("a", 2, 0), NodeResources("b", 1, 0)]
    check_resources([ResourcePool([3], strategy="PACK")], nodes)
    with pytest.raises(ResourceError, match="on one node"):
        check_resources([ResourcePool([3])], nodes)
    with pytest.raises(ResourceError, match="ask for 4 CPUs"):
        check_resources([ResourcePool([4], strategy="PACK")], nodes)


def test_the_report_says_what_each_node_has_and_would_give() -> None:
    manager = ResourcePoolManager({"big": [2], "small": ResourcePool([1], name="small")}, {"actor": "big"})
    nodes = [NodeResources("a", 2, 0, free={"CPU": 2}), NodeResources("b", 8, 0)]
    assert manager.report(nodes).splitlines() == [
        "pool big: [2] processes, each 1 CPUs, 0 GPUs; roles: actor",
        "pool small: [1] processes, each 1 CPUs, 0 GPUs; roles: none",
        "node a: 2 CPUs, 0 GPUs (free: 2 CPUs, 0 GPUs); needed: 2 CPUs, 0 GPUs",
        "node b: 8 CPUs, 0 GPUs; needed: 1 CPUs, 0 GPUs",
    ]
    packed = ResourcePoolManager({"p": ResourcePool([3], strategy="PACK")}, {})
    nodes = [NodeResources("a", 2, 0), NodeResources("b", 2, 0)]
    assert [line.rpartition("; ")[2] for line in packed.report(nodes).splitlines()[1:]] == [
        "needed: 2 CPUs, 0 GPUs",
        "needed: 1 CPUs, 0 GPUs",
    ]


wishes = st.lists(st.tuples(st.sampled_from("pq"), st.integers(1, 3)), min_size=1, max_size=4)


@given(wishes=wishes, rooms=st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_a_plan_fits_and_stays_the_same(wishes, rooms) -> None:
    shares = [Share(pool, count, {"CPU": 1.0}) for pool, count in wishes]
    capacities = [{"CPU": float(room)} for room in rooms]
    plan = plan_nodes(shares, capacities)
    assert plan == plan_nodes(shares, capacities)
    if plan is None:
        # One share alone, or all on one node, is never missed.
        assert max(rooms) < sum(share.processes for share in shares)
    else:
        for node, room in enumerate(rooms):
            assert sum(s.processes for s, place in zip(shares, plan, strict=True) if place == node) <= room


@pytest.mark.parametrize(
    ("counts", "rooms", "plan"),
    [
        ([1, 1], [4, 4], [0, 1]),  # different nodes where there are
        ([1, 1], [4, 0], [0, 0]),
        ([2, 1], [1, 2], [1, 0]),
        ([1, 2], [2, 2], [0, 1]),  # in the order that was asked for
        ([1, 2], [2, 1], [1, 0]),
        ([1, 1, 1], [2, 2], [0, 1, 0]),
        ([3], [2, 2], None),
    ],
)
def test_plans(counts, rooms, plan) -> None:
    shares = [Share("p", count, {"CPU": 1.0}) for count in counts]
    assert plan_nodes(shares, [{"CPU": float(room)} for room in rooms]) == plan


class Parallel(LocalRuntime):
    """Lets groups start only once all of them are being started."""

    capabilities = RuntimeCapabilities(parallel_launch=True)

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.barrier, self.lock = threading.Barrier(groups), threading.Lock()

    def nodes(self):
        return [NodeResources("here", 8.0, 0.0)]

    def launch(self, pool, spec, timeout):
        self.barrier.wait(60.0)
        with self.lock:
            return super().launch(pool, spec, timeout)


class Unwilling(Worker):
    def __init__(self) -> None:
        raise ValueError("not today")


def test_groups_start_at_the_same_time() -> None:
    manager = ResourcePoolManager({"a": [1], "b": [1], "c": [1]}, {"x": "a", "y": "b", "z": "c", "w": "b"})
    with Parallel(3) as runtime:
        views = start_groups(manager, {role: ClassWithInitArgs(Worker) for role in "xyzw"}, runtime=runtime, name="g.")
        assert [(role, view.name) for role, view in views.items()] == [
            ("x", "g.a"), ("y", "g.b"), ("z", "g.c"), ("w", "g.b")
        ]  # fmt: skip
        assert views["y"].workers == views["w"].workers


@pytest.mark.parametrize("failing", ["x", "y"])
def test_no_group_is_left_if_another_fails_to_start(failing: str) -> None:
    manager = ResourcePoolManager({"a": [1], "b": [1]}, {"x": "a", "y": "b"})
    with Parallel(2) as runtime:
        roles = {role: ClassWithInitArgs(Unwilling if role == failing else Worker) for role in "xy"}
        with pytest.raises(WorkerError, match="not today"):
            start_groups(manager, roles, runtime=runtime)
        assert runtime._hosts == []
