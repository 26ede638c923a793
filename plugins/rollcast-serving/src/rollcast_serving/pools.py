"""Building pools, and the roles in them, from the config's ``placement`` section."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import Any

from rollcast import ResourcePool, ResourcePoolManager, build_section
from rollcast.contracts.device import CUDA, Device, find_device
from rollcast.contracts.sections import PlacementConfig, PoolConfig
from rollcast.contracts.stage import roles
from rollcast.errors import ConfigError, ResourceError

__all__ = ["GLOBAL_POOL", "JUDGE", "ROLLOUT", "build_pools"]

#: Name of the pool of ``placement.nnodes`` and ``placement.n_gpus_per_node``.
GLOBAL_POOL = "global_pool"
#: Role of the rollout's replicas.
ROLLOUT = "rollout"
#: Role of the replicas of the judge model that rewards call.
JUDGE = "judge"


def build_pools(placement: PlacementConfig) -> ResourcePoolManager:
    """Return the pools, and the pool of each role.

    Raises:
        ConfigError: a number, a device, a role or a pool is not valid; the message names the key and valid values.
    """
    device = find_device(placement.device)
    if GLOBAL_POOL in placement.pools:
        raise ConfigError(f"placement.pools names {GLOBAL_POOL!r}; its size is placement.nnodes and n_gpus_per_node")
    pools = {GLOBAL_POOL: PoolConfig([placement.n_gpus_per_node] * placement.nnodes)}
    pools |= {name: _read_pool(name, value) for name, value in placement.pools.items()}
    _check_mapping(placement, pools)
    mapping: dict[Hashable, str] = {role: placement.mapping.get(role, GLOBAL_POOL) for role in _known_roles()}
    used = {name: _build_pool(name, pool, device) for name, pool in pools.items() if name in mapping.values()}
    return ResourcePoolManager(used, mapping)


def _read_pool(name: str, value: Any) -> PoolConfig:
    """Return a pool of ``placement.pools``, given as a list of counts or as a mapping with options."""
    key = f"placement.pools.{name}"
    if isinstance(value, Mapping):
        pool: PoolConfig = build_section(PoolConfig, value, key, closed=True)
        key = f"{key}.processes"
    else:
        pool = build_section(PoolConfig, {"processes": value}, key)
    if not pool.processes or min(pool.processes) < 1:
        raise ConfigError(f"{key} is {pool.processes}; list the processes on each node, as in [8, 8]")
    return pool


def _build_pool(name: str, pool: PoolConfig, device: Device) -> ResourcePool:
    if pool.device is not None:
        device = find_device(pool.device, f"placement.pools.{name}.device")
    uses_device = bool(device.resource)
    try:
        return ResourcePool(
            pool.processes,
            use_gpu=uses_device,
            max_colocate_count=pool.max_colocate_count,
            name=name,
            cpus_per_process=pool.cpus_per_process,
            accelerator=device.resource or CUDA.resource,
            accelerator_type=pool.accelerator_type,
            resources=pool.resources,
            strategy=pool.strategy,
        )
    except ResourceError as error:
        raise ConfigError(f"placement.pools.{name}: {error}") from error


def _check_mapping(placement: PlacementConfig, pools: Collection[str]) -> None:
    known = _known_roles()
    for role, pool in placement.mapping.items():
        if role not in known:
            raise ConfigError(f"placement.mapping names the role {role!r}; roles: {', '.join(known)}")
        if pool not in pools:
            raise ConfigError(f"placement.mapping.{role} is {pool!r}, which is not a pool; pools: {', '.join(pools)}")
    unused = set(placement.pools) - set(placement.mapping.values())
    if unused:
        raise ConfigError(f"placement.mapping puts no role in placement.pools.{', '.join(sorted(unused))}")


def _known_roles() -> list[str]:
    """Return the names allowed in ``placement.mapping``: registered roles, and those of replicas."""
    return sorted({*roles.names(), ROLLOUT, JUDGE})
