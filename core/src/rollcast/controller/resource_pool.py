"""Resource pools: how many processes run on how many nodes, and which role lives in which pool."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from rollcast.controller.capacity import NodeResources, Share, check_shares, describe, describe_node, plan_nodes
from rollcast.errors import ResourceError

__all__ = ["NodeResources", "ResourcePool", "ResourcePoolManager", "ResourcePoolView", "check_resources", "shares_of"]

_STRATEGIES = ("STRICT_PACK", "PACK")
#: What workers ask of their place, so all places of a pool must agree on it.
_COMMON = ("use_gpu", "accelerator", "cpus_per_process", "max_colocate_count", "detached")


class ResourcePool:
    """Processes on nodes, one rank each.

    Args:
        process_on_nodes: number of processes on each node, such as ``[8, 8]``.
        use_gpu: each process has one accelerator; otherwise CPU only.
        max_colocate_count: how many groups may share the pool's devices at once; each group's
            processes take that fraction of a device.
        name: for messages and placement groups.
        cpus_per_process: CPU cores that a process reserves in the cluster's book-keeping.
        accelerator: Ray's name for the device: ``GPU`` (CUDA and ROCm) or ``NPU`` (Ascend).
        accelerator_type: only nodes with this type of device, such as ``H100``.
        resources: custom resources that each process reserves, by name.
        strategy: ``STRICT_PACK`` keeps the processes of one entry of ``process_on_nodes`` on one node;
            ``PACK`` does so where it can.
        detached: the reservation outlives this process.

    Raises:
        ResourceError: a count is not positive, or the options contradict each other.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool = False,
        max_colocate_count: int = 1,
        name: str = "pool",
        cpus_per_process: float = 1.0,
        *,
        accelerator: str = "GPU",
        accelerator_type: str | None = None,
        resources: Mapping[str, float] | None = None,
        strategy: str = "STRICT_PACK",
        detached: bool = False,
    ) -> None:
        self.process_on_nodes = tuple(process_on_nodes)
        self.use_gpu = use_gpu
        self.max_colocate_count = max_colocate_count
        self.name = name
        self.cpus_per_process = cpus_per_process
        self.accelerator = accelerator
        self.accelerator_type = accelerator_type
        self.resources = dict(resources or {})
        self.strategy = strategy
        self.detached = detached
        complaint = self._complaint()
        if complaint:
            raise ResourceError(f"pool {name!r}: {complaint}")

    def _complaint(self) -> str | None:
        counts = list(self.process_on_nodes)
        if not counts or any(count < 1 for count in counts):
            return f"process_on_nodes is {counts}; every node needs at least one process"
        if self.max_colocate_count < 1:
            return f"max_colocate_count is {self.max_colocate_count}; at least 1 is needed"
        if self.strategy not in _STRATEGIES:
            return f"strategy is {self.strategy!r}; valid: {', '.join(_STRATEGIES)}"
        if self.cpus_per_process < 0:
            return f"cpus_per_process is {self.cpus_per_process:g}; it cannot be negative"
        for key, amount in self.resources.items():
            if key in ("CPU", "GPU", self.accelerator):
                return f"resources names {key!r}; use cpus_per_process, use_gpu and accelerator for it"
            if amount <= 0:
                return f"resources[{key!r}] is {amount:g}; it must be positive"
        if not self.bundle():
            return "a process needs something of its node: cpus_per_process, use_gpu or resources"
        return None

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

    def bundle(self) -> dict[str, float]:
        """What one process reserves, by Ray's names of resources."""
        wanted = {"CPU": self.cpus_per_process} if self.cpus_per_process else {}
        if self.use_gpu:
            wanted[self.accelerator] = 1.0
        if self.accelerator_type is not None:
            # A node has 1 of these however many devices it has, so each process asks for a trace of it.
            wanted[f"accelerator_type:{self.accelerator_type}"] = 0.001
        return {**wanted, **self.resources}

    def places(self) -> list[tuple[ResourcePool, int]]:
        """For each rank the pool that reserves its place, and the number of the place there."""
        return [(self, number) for number in range(self.world_size)]

    def split(self, sizes: int | Sequence[int]) -> list[ResourcePoolView]:
        """Consecutive parts of this pool, each a pool; their processes stay where this pool has them.

        Args:
            sizes: processes in each part; a single number cuts into parts of that size.

        Raises:
            ResourceError: the sizes do not add up to the pool.
        """
        if isinstance(sizes, int):
            count = self.world_size // sizes if sizes > 0 else 0
            parts = [sizes] * count
        else:
            parts = list(sizes)
        if not parts or any(size < 1 for size in parts) or sum(parts) != self.world_size:
            raise ResourceError(
                f"pool {self.name!r} has {self.world_size} processes; parts of {sizes} do not add up to them"
            )
        places, views, start = self.places(), [], 0
        for size in parts:
            views.append(ResourcePoolView(f"{self.name}[{start}:{start + size}]", places[start : start + size]))
            start += size
        return views

    def merge(self, *others: ResourcePool, name: str | None = None) -> ResourcePoolView:
        """This pool and others as one; their processes stay where those pools have them.

        Raises:
            ResourceError: the pools differ in what they give a process, or have a process in common.
        """
        pools = (self, *others)
        places = [place for pool in pools for place in pool.places()]
        return ResourcePoolView(name or "+".join(pool.name for pool in pools), places)

    def __repr__(self) -> str:
        device = self.accelerator.lower() if self.use_gpu else "cpu"
        return f"{type(self).__name__}({list(self.process_on_nodes)}, {device}, name={self.name!r})"


class ResourcePoolView(ResourcePool):
    """Some processes of one or several other pools, which keep the reservation.

    A group on a view and a group on the pool beneath it share devices like two groups on one pool.

    Args:
        name: for messages.
        places: see :meth:`ResourcePool.places`.

    Raises:
        ResourceError: the pools beneath differ in what they give a process, or a place comes twice.
    """

    def __init__(self, name: str, places: Sequence[tuple[ResourcePool, int]]) -> None:
        if len({(id(base), number) for base, number in places}) < len(places):
            raise ResourceError(f"pool {name!r} would have a process twice; merge pools that have none in common")
        bases = list({id(base): base for base, _ in places}.values())
        for field in _COMMON:
            values = {base.name: getattr(base, field) for base in bases}
            if len(set(values.values())) > 1:
                raise ResourceError(f"pools with different {field} cannot be one: {values}")
        self._places = list(places)
        first = bases[0]
        super().__init__(
            self._counts(),
            first.use_gpu,
            first.max_colocate_count,
            name,
            first.cpus_per_process,
            accelerator=first.accelerator,
            accelerator_type=first.accelerator_type,
            resources=first.resources,
            strategy=first.strategy,
            detached=first.detached,
        )

    def _counts(self) -> list[int]:
        counts: dict[tuple[int, int], int] = {}
        for base, number in self._places:
            node_of = [node for node, count in enumerate(base.process_on_nodes) for _ in range(count)]
            key = (id(base), node_of[number])
            counts[key] = counts.get(key, 0) + 1
        return list(counts.values())

    def places(self) -> list[tuple[ResourcePool, int]]:
        return list(self._places)


def shares_of(pools: Sequence[ResourcePool]) -> list[Share]:
    """What the pools want of each node; a pool and its parts count once."""
    bases = {id(base): base for pool in pools for base, _ in pool.places()}
    return [
        Share(base.name, count, base.bundle(), divisible=base.strategy == "PACK")
        for base in bases.values()
        for count in base.process_on_nodes
    ]


def check_resources(pools: Sequence[ResourcePool], nodes: Sequence[NodeResources], now: bool = False) -> None:
    """Refuse pools that the cluster can never hold, or with ``now`` cannot hold at present.

    Raises:
        ResourceError: with what each pool asks for and what each node has.
    """
    check_shares(shares_of(pools), nodes, now)


class ResourcePoolManager:
    """Names pools and says which role lives in which.

    Roles of one pool are fused: they share its processes. Roles of different pools are split: each has
    processes and devices of its own.

    Args:
        resource_pool_spec: pool name → processes on each node, or a pool with options of its own.
        mapping: role → pool name.
        use_gpu: of the pools that are given by their numbers alone; see :class:`ResourcePool`.

    Raises:
        ResourceError: a role is mapped to a pool that is not in the spec.
    """

    def __init__(
        self,
        resource_pool_spec: Mapping[str, Sequence[int] | ResourcePool],
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
            name: spec if isinstance(spec, ResourcePool) else ResourcePool(spec, use_gpu=use_gpu, name=name)
            for name, spec in resource_pool_spec.items()
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

    def check(self, nodes: Sequence[NodeResources], now: bool = False) -> None:
        """Refuse pools that the cluster can never hold, before anything is started.

        Args:
            nodes: as ``runtime.nodes()`` gives them.
            now: refuse also what would have to wait for others.

        Raises:
            ResourceError: with what each pool asks for and what each node has.
        """
        check_resources(list(self.resource_pool_dict.values()), nodes, now)

    def report(self, nodes: Sequence[NodeResources]) -> str:
        """What each pool asks for and, for each node, what it has and what it would have to give.

        Raises:
            ResourceError: see :meth:`check`.
        """
        self.check(nodes)
        roles = self.roles_by_pool()
        lines = [
            f"pool {name}: {list(pool.process_on_nodes)} processes, each {describe(pool.bundle())}; "
            f"roles: {', '.join(map(str, roles[name])) or 'none'}"
            for name, pool in self.resource_pool_dict.items()
        ]
        shares = shares_of(list(self.resource_pool_dict.values()))
        names = {key for share in shares for key in share.bundle}
        plan = plan_nodes(shares, [node.total for node in nodes])
        if plan is None:
            shares = [piece for share in shares for piece in share.pieces()]
            plan = plan_nodes(shares, [node.total for node in nodes])
        for number, node in enumerate(nodes):
            line = describe_node(node, names)
            if plan is not None:
                here = [share.total for share, place in zip(shares, plan, strict=True) if place == number]
                need = {name: sum(total.get(name, 0.0) for total in here) for name in names}
                line += f"; needed: {describe(need, names)}"
            lines.append(line)
        return "\n".join(lines)
