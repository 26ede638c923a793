"""Start one fused group in each pool, from the mapping of roles to pools."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from enum import Enum
from typing import Any

from rollcast.controller.resource_pool import ResourcePoolManager
from rollcast.controller.runtime import Runtime
from rollcast.controller.worker import ClassWithInitArgs
from rollcast.controller.worker_group import WorkerGroup
from rollcast.errors import ResourceError

__all__ = ["start_groups"]


def start_groups(
    manager: ResourcePoolManager,
    roles: Mapping[Hashable, ClassWithInitArgs[Any]],
    *,
    runtime: Runtime,
    **options: Any,
) -> dict[Hashable, WorkerGroup]:
    """A view for each role; roles of one pool share its processes, roles of different pools do not.

    Nothing starts unless the cluster can hold all pools, and nothing is left if a group fails to start.

    Args:
        manager: says which role lives in which pool.
        roles: role → what lives there. Enum members are called by their values in messages.
        runtime: starts the processes.
        options: of every group; see :class:`WorkerGroup`. ``name`` is put before the pool's.

    Raises:
        ResourceError: a role has no pool, or a pool cannot be placed.
        WorkerError: a constructor raised.
    """
    by_pool: dict[str, list[Hashable]] = {}
    for role in roles:
        manager.get_resource_pool(role)
        by_pool.setdefault(manager.mapping[role], []).append(role)
    if not by_pool:
        raise ResourceError("there is no role to start")
    manager.check(runtime.nodes())
    prefix = options.pop("name", "")
    started: list[WorkerGroup] = []
    views: dict[Hashable, WorkerGroup] = {}
    try:
        for pool_name, members in by_pool.items():
            classes = {_name(role): roles[role] for role in members}
            pool = manager.resource_pool_dict[pool_name]
            group = WorkerGroup(pool, classes, runtime=runtime, name=f"{prefix}{pool_name}", **options)
            started.append(group)
            views.update({role: group.spawn([_name(role)])[_name(role)] for role in members})
    except BaseException:
        for group in started:
            group.shutdown()
        raise
    return {role: views[role] for role in roles}


def _name(role: Hashable) -> str:
    return str(role.value if isinstance(role, Enum) else role)
