"""Pools of a config: counts or options, and the device of their processes."""

from __future__ import annotations

import pytest

from rollcast.contracts.sections import PlacementConfig
from rollcast.errors import ConfigError
from rollcast_serving.pools import build_pools


def placement(pool, **keys) -> PlacementConfig:
    return PlacementConfig(pools={"other": pool}, mapping={"critic": "other"}, **{"device": "cpu", **keys})


def test_a_pool_is_given_by_counts_or_by_options() -> None:
    plain = build_pools(placement([2, 2])).get_resource_pool("critic")
    assert (plain.process_on_nodes, plain.max_colocate_count, plain.strategy) == ((2, 2), 1, "STRICT_PACK")
    options = {
        "processes": [4],
        "max_colocate_count": 2,
        "accelerator_type": "H100",
        "strategy": "PACK",
        "resources": {"fast_disk": 0.5},
        "cpus_per_process": 0.5,
    }
    pool = build_pools(placement(options, device="npu")).get_resource_pool("critic")
    assert (pool.process_on_nodes, pool.max_colocate_count, pool.strategy) == ((4,), 2, "PACK")
    assert pool.bundle() == {"CPU": 0.5, "NPU": 1.0, "accelerator_type:H100": 0.001, "fast_disk": 0.5}


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (
            {"processes": [1], "strateg": "PACK"},
            r"no key 'placement\.pools\.other\.strateg'; did you mean 'placement\.pools\.other\.strategy'",
        ),
        ({"processes": [1], "strategy": "SPREAD"}, r"placement\.pools\.other: .*strategy is 'SPREAD'; valid"),
        ({"processes": [0]}, r"placement\.pools\.other\.processes is \[0\]; list the processes on each node"),
        ({"strategy": "PACK"}, r"placement\.pools\.other\.processes is \[\]"),
        ([], r"placement\.pools\.other is \[\]"),
        ({"processes": [1], "max_colocate_count": "many"}, r"placement\.pools\.other\.max_colocate_count must be"),
    ],
)
def test_a_wrong_pool_is_refused_by_its_key(pool, message) -> None:
    with pytest.raises(ConfigError, match=message):
        build_pools(placement(pool))


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"placement\.device is 'tpu'; valid: auto, cpu, cuda"):
        build_pools(PlacementConfig(device="tpu"))
