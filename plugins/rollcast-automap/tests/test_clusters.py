"""Clusters from options: kinds by datasheet, own figures, nodes that differ, and what a mapping says of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollcast import build_section
from rollcast.errors import ConfigError
from rollcast_automap.contract import Cluster, Pool
from rollcast_automap.costs.analytical import AnalyticalConfig, AnalyticalCosts
from rollcast_automap.costs.clusters import ClusterConfig, build_cluster
from rollcast_automap.costs.device_kinds import ACCELERATOR_TYPES, DEVICE_KINDS, LINK_BANDWIDTHS, PEAK_TFLOPS
from rollcast_automap.problem import _pool_overrides
from rollcast_automap.search.planners import BranchAndBound, Exhaustive
from rollcast_automap.testing import small_problem


def cluster(**options: Any) -> Cluster:
    return build_cluster(build_section(ClusterConfig, options, "cluster", closed=True))


def test_every_kind_has_all_figures() -> None:
    for name, kind in DEVICE_KINDS.items():
        (node,) = cluster(device=name).nodes
        assert node.kind == kind
        assert node.link_bandwidth == LINK_BANDWIDTHS[name]
        assert min(kind.memory_bytes, kind.memory_bandwidth, kind.host_bandwidth, node.link_bandwidth) > 0
        assert kind.source
        if name != "cpu":
            assert kind.flops["bfloat16"] == PEAK_TFLOPS[name.upper()] * 1e12
            assert name in ACCELERATOR_TYPES


def test_groups_take_what_they_leave_out_from_the_cluster() -> None:
    found = cluster(devices_per_node=4, groups=[{"nodes": 2}, {"device": "a100", "devices_per_node": 8}])
    assert [(node.kind.name, node.devices) for node in found.nodes] == [("h100", 4), ("h100", 4), ("a100", 8)]
    assert found.nodes[2].link_bandwidth == LINK_BANDWIDTHS["a100"]


def test_own_figures_replace_those_of_the_datasheet() -> None:
    figures = {"memory_gib": 94, "memory_gbyte_s": 3900, "tflops": 835.5, "link_gbyte_s": 300, "host_gbyte_s": 50}
    (node,) = cluster(**figures).nodes
    assert (node.kind.memory_bytes, node.kind.memory_bandwidth) == (94 << 30, 3.9e12)
    assert (node.kind.flops["bfloat16"], node.link_bandwidth, node.kind.host_bandwidth) == (835.5e12, 3e11, 5e10)
    (own,) = cluster(device="tpu", **figures).nodes
    assert replace(own.kind, name="h100", source="", flops={}) == replace(node.kind, source="", flops={})
    # Figures of the cluster are those of its device, not of another one's.
    (other,) = cluster(**figures, groups=[{"device": "a100"}]).nodes
    assert other.kind == DEVICE_KINDS["a100"]


def test_equal_devices_with_other_figures_have_names_of_their_own() -> None:
    found = cluster(groups=[{"nodes": 2}, {"memory_gib": 64}, {"link_gbyte_s": 32}, {"memory_gib": 64}])
    assert [node.kind.name for node in found.nodes] == ["h100", "h100", "h100#2", "h100#3", "h100#2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"device": "tpu"},
            r"cluster\.device is 'tpu'; valid: a10, .*mi300x, cpu; .*cluster\.memory_gib, .*host_gbyte_s",
        ),
        (
            {"groups": [{}, {"device": "tpu", "tflops": 9}]},
            r"cluster\.groups\[1\]\.device is 'tpu'.* [^,]*memory_gib, ",
        ),
        ({"groups": [{"devise": "h100"}]}, r"no key 'cluster\.groups\[0\]\.devise'; did you mean .*device'"),
        ({"groups": [{"nodes": 0}]}, r"cluster\.groups\[0\]\.nodes must be at least 1"),
        ({"memory_gib": 0}, r"cluster\.memory_gib must be above 0"),
    ],
)
def test_bad_clusters_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cluster(**options)


def test_pools_of_a_mixed_cluster_ask_for_their_devices() -> None:
    mixed = cluster(groups=[{"device": "h100"}, {"device": "mi300x"}, {"device": "h100", "memory_gib": 64}])
    pools = {
        "pool_0": Pool("pool_0", ((0, 8),)),
        "pool_1": Pool("pool_1", ((1, 4),)),
        "pool_2": Pool("pool_2", ((1, 4), (2, 8))),
    }
    homes = {"actor": "pool_0", "critic": "pool_1", "ref": "pool_2"}
    assert _pool_overrides(mixed, pools, homes, "pool_0") == [
        "placement.pools.pool_1={processes: [4], accelerator_type: AMD-Instinct-MI300X-OAM}",
        "placement.pools.pool_2=[4, 8]",
        "placement.pools.pool_0={processes: [8], accelerator_type: H100}",
        "placement.mapping.critic=pool_1",
        "placement.mapping.ref=pool_2",
        "placement.mapping.actor_rollout=pool_0",
    ]
    equal = cluster(nodes=2)
    assert _pool_overrides(equal, {"pool_0": Pool("pool_0", ((0, 8), (1, 8)))}, {"actor": "pool_0"}, "pool_0") == [
        "placement.nnodes=2",
        "placement.n_gpus_per_node=8",
    ]


def test_planners_agree_on_nodes_that_differ() -> None:
    """Pools on one kind and over both are tried, and the slower kind of a pool counts."""
    problem = replace(
        small_problem(), cluster=cluster(devices_per_node=2, groups=[{"device": "h100"}, {"device": "l40s"}])
    )
    costs = AnalyticalCosts(AnalyticalConfig())
    (oracle,), (found,) = (planner().plan(problem, costs) for planner in (Exhaustive, BranchAndBound))
    assert found.step_seconds == pytest.approx(oracle.step_seconds)
    equal = replace(problem, cluster=cluster(devices_per_node=2, device="h100", nodes=2))
    assert Exhaustive().plan(equal, costs)[0].step_seconds < oracle.step_seconds
