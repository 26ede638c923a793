"""Pools, who lives in which, and which of them a cluster can never hold."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcast import ResourcePool, ResourcePoolManager
from rollcast.controller.resource_pool import NodeResources, check_resources
from rollcast.errors import ResourceError


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
