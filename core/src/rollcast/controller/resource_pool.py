"""Resource pools: how many processes run on how many nodes, and which role lives in which pool."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from rollcast.errors import ResourceError

__all__ = ["NodeResources", "ResourcePool", "ResourcePoolManager", "check_resources"]


class ResourcePool:
    """Processes on nodes, one rank each.

    Args:
        process_on_nodes: number of processes on each node, such as ``[8, 8]``.
        use_gpu: each process has one accelerator; otherwise CPU only.
        max_colocate_count: how many groups may share the pool's devices at once; each group's
            processes take that fraction of a device.
        name: for messages and placement groups.
        cpus_per_process: CPU cores that a process reserves in the cluster's book-keeping.

    Raises:
        ResourceError: a count is not positive.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool = False,
        max_colocate_count: int = 1,
        name: str = "pool",
        cpus_per_process: float = 1.0,
    ) -> None:
        if not process_on_nodes or any(count < 1 for count in process_on_nodes):
            raise ResourceError(
                f"pool {name!r}: process_on_nodes is {list(process_on_nodes)}; every node needs at least one process"
            )
        if max_colocate_count < 1:
            raise ResourceError(f"pool {name!r}: max_colocate_count is {max_colocate_count}; at least 1 is needed")
        self.process_on_nodes = tuple(process_on_nodes)
        self.use_gpu = use_gpu
        self.max_colocate_count = max_colocate_count
        self.name = name
        self.cpus_per_process = cpus_per_process

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return sum(self.process_on_nodes)

    def local_rank_list(self) -> list[int]:
        """Each rank's index on its node."""
        return [local for count in self.process_on_nodes for local in range(count)]

    def local_world_size_list(self) -> list[int]:
        """For each rank the number of processes on its node."""
        return [count for count in self.process_on_nodes for _ in range(count)]

    def __repr__(self) -> str:
        device = "gpu" if self.use_gpu else "cpu"
        return f"{type(self).__name__}({list(self.process_on_nodes)}, {device}, name={self.name!r})"


@dataclass(frozen=True)
class NodeResources:
    """What a node of the cluster has in all."""

    address: str
    cpus: float
    gpus: float


@dataclass(frozen=True)
class _Share:
    """What a pool wants of one node."""

    pool: ResourcePool
    processes: int

    @property
    def cpus(self) -> float:
        return self.processes * self.pool.cpus_per_process

    @property
    def gpus(self) -> float:
        return float(self.processes if self.pool.use_gpu else 0)


def check_resources(pools: Sequence[ResourcePool], nodes: Sequence[NodeResources]) -> None:
    """Refuse pools that the cluster can never hold, before anything is started.

    What it lets pass may still not fit, because finding the best packing is a hard problem; what it
    refuses never fits.

    Raises:
        ResourceError: with what each pool asks for and what each node has.
    """
    have = "; ".join(f"node {node.address}: {node.cpus:g} CPUs, {node.gpus:g} GPUs" for node in nodes)
    have = have or "the cluster has no node"
    advice = "Lower placement.n_gpus_per_node or placement.nnodes, or join a larger cluster"
    shares = [_Share(pool, count) for pool in pools for count in pool.process_on_nodes]
    for share in shares:
        if not any(node.cpus >= share.cpus and node.gpus >= share.gpus for node in nodes):
            raise ResourceError(
                f"pool {share.pool.name!r} asks for {share.processes} processes on one node ({share.cpus:g} CPUs, "
                f"{share.gpus:g} GPUs), but no node has them. {have}. {advice}"
            )
    asked = "; ".join(
        f"pool {pool.name!r}: {list(pool.process_on_nodes)} processes, each "
        f"{pool.cpus_per_process:g} CPUs and {int(pool.use_gpu)} GPUs"
        for pool in pools
    )
    for unit in ("cpus", "gpus"):
        complaint = _too_little(
            [getattr(share, unit) for share in shares], [getattr(node, unit) for node in nodes], unit[:-1].upper() + "s"
        )
        if complaint is not None:
            raise ResourceError(f"{complaint}. {asked}. {have}. {advice}")


def _too_little(needs: Sequence[float], capacities: Sequence[float], unit: str) -> str | None:
    """Why shares of these sizes cannot lie on nodes of these capacities; None if nothing speaks against it."""
    slack = 1e-6  # sums of fractions of a core
    if sum(needs) > sum(capacities) + slack:
        return f"the pools ask for {sum(needs):g} {unit}, the cluster has {sum(capacities):g}"
    for size in sorted({need for need in needs if need > 0}):
        large = sum(need >= size for need in needs)
        room = sum(int((capacity + slack) // size) for capacity in capacities)
        if large > room:
            return (
                f"the pools ask {large} times for {size:g} or more {unit} on one node, the cluster has room for {room}"
            )
    return None


class ResourcePoolManager:
    """Names pools and says which role lives in which.

    Args:
        resource_pool_spec: pool name → processes on each node.
        mapping: role → pool name.
        use_gpu: see :class:`ResourcePool`.

    Raises:
        ResourceError: a role is mapped to a pool that is not in the spec.
    """

    def __init__(
        self,
        resource_pool_spec: Mapping[str, Sequence[int]],
        mapping: Mapping[Hashable, str],
        use_gpu: bool = False,
    ) -> None:
        for role, pool in mapping.items():
            if pool not in resource_pool_spec:
                raise ResourceError(
                    f"role {role} is placed in pool {pool!r}, which is not defined; "
                    f"defined pools: {', '.join(resource_pool_spec) or 'none'}"
                )
        self.mapping = dict(mapping)
        self.resource_pool_dict = {
            name: ResourcePool(counts, use_gpu=use_gpu, name=name) for name, counts in resource_pool_spec.items()
        }

    def get_resource_pool(self, role: Hashable) -> ResourcePool:
        """The pool of a role.

        Raises:
            ResourceError: the role has no pool.
        """
        if role not in self.mapping:
            known = ", ".join(str(known) for known in self.mapping)
            raise ResourceError(f"role {role} has no pool; placed roles: {known or 'none'}")
        return self.resource_pool_dict[self.mapping[role]]

    def roles_by_pool(self) -> dict[str, list[Hashable]]:
        """Pool name → its roles, in the order of the mapping."""
        by_pool: dict[str, list[Hashable]] = {name: [] for name in self.resource_pool_dict}
        for role, pool in self.mapping.items():
            by_pool[pool].append(role)
        return by_pool

    def check(self, nodes: Sequence[NodeResources]) -> None:
        """Raise :class:`ResourceError` with the numbers if the cluster cannot hold all pools."""
        check_resources(list(self.resource_pool_dict.values()), nodes)
