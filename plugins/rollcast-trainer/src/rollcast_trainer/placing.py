"""From the config's ``placement`` section to pools and the roles in them."""

from __future__ import annotations

from collections.abc import Collection, Hashable

from rollcast.config.schemas import PlacementConfig
from rollcast.controller.resource_pool import ResourcePoolManager
from rollcast.errors import ConfigError
from rollcast.runtime.device import device_count
from rollcast_trainer.roles import Role

__all__ = ["GLOBAL_POOL", "build_pools"]

#: The pool of ``placement.nnodes`` and ``placement.n_gpus_per_node``.
GLOBAL_POOL = "global_pool"
_DEVICES = ("auto", "cpu", "cuda")


def build_pools(placement: PlacementConfig) -> ResourcePoolManager:
    """The pools, and for each role the one in which it lives.

    Raises:
        ConfigError: a number, a device, a role or a pool is not valid; names the key and what is.
    """
    device = placement.device
    if device not in _DEVICES:
        raise ConfigError(f"placement.device is {device!r}; valid: {', '.join(_DEVICES)}")
    for key in ("nnodes", "n_gpus_per_node"):
        if getattr(placement, key) < 1:
            raise ConfigError(f"placement.{key} is {getattr(placement, key)}; it must be at least 1")
    for name, counts in placement.pools.items():
        if name == GLOBAL_POOL:
            raise ConfigError(f"placement.pools names {name!r}; its size is placement.nnodes and n_gpus_per_node")
        if not counts or min(counts) < 1:
            raise ConfigError(f"placement.pools.{name} is {counts}; give the processes on each node, as in [8, 8]")
    pools = {GLOBAL_POOL: [placement.n_gpus_per_node] * placement.nnodes, **placement.pools}
    _check_mapping(placement, pools)
    mapping: dict[Hashable, str] = {role: placement.mapping.get(role.placed_as, GLOBAL_POOL) for role in Role}
    used = {name: counts for name, counts in pools.items() if name in mapping.values()}
    return ResourcePoolManager(used, mapping, device == "cuda" or (device == "auto" and device_count() > 0))


def _check_mapping(placement: PlacementConfig, pools: Collection[str]) -> None:
    roles = {role.placed_as for role in Role}
    for role, pool in placement.mapping.items():
        if role not in roles:
            raise ConfigError(f"placement.mapping names the role {role!r}; roles: {', '.join(sorted(roles))}")
        if pool not in pools:
            raise ConfigError(f"placement.mapping.{role} is {pool!r}, no pool; pools: {', '.join(pools)}")
    unused = set(placement.pools) - set(placement.mapping.values())
    if unused:
        raise ConfigError(f"no role of placement.mapping lives in placement.pools.{', '.join(sorted(unused))}")
