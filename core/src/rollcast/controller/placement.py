"""Placement: named pools and their roles, the check that the cluster can hold them, and the start of their groups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rollcast.contracts.pools import NodeResources, ResourcePool, describe_resources
from rollcast.contracts.runtime import Runtime
from rollcast.contracts.worker import ClassWithInitArgs
from rollcast.controller.worker_group import WorkerGroup
from rollcast.errors import ResourceError

__all__ = ["ResourcePoolManager", "start_groups"]

_SLACK = 1e-6  # tolerance for sums of fractions of a core
_ADVICE = "Lower placement.n_gpus_per_node or placement.nnodes, or join a larger cluster"


class ResourcePoolManager:
    """Named pools, and the pool of each role.

    Roles in one pool are fused: they share its processes. Roles in different pools are split: each has its own
    processes and devices.

    Args:
        resource_pool_spec: pool name → number of processes on each node, or a :class:`ResourcePool` with options.
        mapping: role → pool name.
        use_gpu: ``use_gpu`` of the pools that are given only by their numbers; see :class:`ResourcePool`.

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
        """Return the pool of a role.

        Raises:
            ResourceError: the role has no pool.
        """
        if role not in self.mapping:
            known = ", ".join(str(known) for known in self.mapping)
            raise ResourceError(f"role {role} has no pool; placed roles: {known or 'none'}")
        return self.resource_pool_dict[self.mapping[role]]

    def roles_by_pool(self) -> dict[str, list[Hashable]]:
        """Return the roles of each pool by name, in the order of the mapping."""
        by_pool: dict[str, list[Hashable]] = {name: [] for name in self.resource_pool_dict}
        for role, pool in self.mapping.items():
            by_pool[pool].append(role)
        return by_pool

    def check(self, nodes: Sequence[NodeResources], now: bool = False) -> None:
        """Check that the cluster can hold the pools, before anything is started.

        Args:
            nodes: nodes as returned by ``runtime.nodes()``.
            now: True to count only resources that are free at present, where known.

        Raises:
            ResourceError: the cluster can never hold the pools; lists what each pool needs and each node has.
        """
        check_shares(_shares_of(self.resource_pool_dict.values()), nodes, now)

    def report(self, nodes: Sequence[NodeResources]) -> str:
        """Return text with a line per pool (processes, roles) and per node (resources, amounts needed).

        Raises:
            ResourceError: see :meth:`check`.
        """
        self.check(nodes)
        roles = self.roles_by_pool()
        lines = [
            f"pool {name}: {list(pool.process_on_nodes)} processes, each {describe_resources(pool.bundle())}; "
            f"roles: {', '.join(map(str, roles[name])) or 'none'}"
            for name, pool in self.resource_pool_dict.items()
        ]
        shares = _shares_of(self.resource_pool_dict.values())
        names = {key for share in shares for key in share.bundle}
        plan = plan_nodes(shares, [node.total for node in nodes])
        if plan is None:
            shares = [piece for share in shares for piece in share.pieces()]
            plan = plan_nodes(shares, [node.total for node in nodes])
        for number, node in enumerate(nodes):
            line = node.describe(names)
            if plan is not None:
                here = [share.total for share, place in zip(shares, plan, strict=True) if place == number]
                need = {name: sum(total.get(name, 0.0) for total in here) for name in names}
                line += f"; needed: {describe_resources(need, names)}"
            lines.append(line)
        return "\n".join(lines)

    def plan(self, capacities: Sequence[Mapping[str, float]]) -> list[int] | None:
        """Assign a node to each entry of the pools' ``process_on_nodes``, deterministically.

        The entries of a pool go to different nodes if possible, and to the first nodes with enough resources.

        Args:
            capacities: available resources of each node, by name; nodes in order of preference.

        Returns:
            An index into ``capacities`` for each entry, pool by pool; None if no assignment was found.
        """
        return plan_nodes(_shares_of(self.resource_pool_dict.values()), capacities)


def start_groups(
    manager: ResourcePoolManager,
    roles: Mapping[Hashable, ClassWithInitArgs[Any]],
    *,
    runtime: Runtime,
    **options: Any,
) -> dict[Hashable, WorkerGroup]:
    """Start one group in each pool and return a view for each role; roles in one pool share its processes.

    No group starts unless the cluster can hold all pools, and all groups are shut down if one fails to start. Groups
    start in parallel if the runtime supports it (``RuntimeCapabilities.parallel_launch``).

    Args:
        manager: pools, and the pool of each role.
        roles: role → class with arguments. Messages show enum members by their values.
        runtime: runtime that starts the processes.
        options: options of every group; see :class:`WorkerGroup`. ``name`` is a prefix to the pool's name.

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

    def start(pool_name: str) -> WorkerGroup:
        classes = {_name(role): roles[role] for role in by_pool[pool_name]}
        pool = manager.resource_pool_dict[pool_name]
        return WorkerGroup(pool, classes, runtime=runtime, name=f"{prefix}{pool_name}", **options)

    groups = _start_all(start, list(by_pool), runtime.capabilities.parallel_launch)
    return {role: groups[manager.mapping[role]].spawn([_name(role)])[_name(role)] for role in roles}


def _start_all(start: Callable[[str], WorkerGroup], pools: Sequence[str], parallel: bool) -> dict[str, WorkerGroup]:
    """Start a group in each pool; if a start fails, shut down the other groups and raise the first error."""
    started: dict[str, WorkerGroup] = {}
    errors: list[Exception] = []

    def run(pool: str) -> None:
        try:
            started[pool] = start(pool)
        except Exception as error:  # noqa: BLE001  # raised below, when the other starts have ended
            errors.append(error)

    try:
        # Daemon threads, because an interrupt of the caller must not wait for a start that hangs.
        threads = [threading.Thread(target=run, args=(pool,), daemon=True) for pool in pools[1:] if parallel]
        for thread in threads:
            thread.start()
        for pool in pools[:1] if parallel else pools:
            run(pool)
            if errors and not parallel:
                break
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
    except BaseException:
        for group in list(started.values()):
            group.shutdown()
        raise
    return started


def _name(role: Hashable) -> str:
    return str(role.value if isinstance(role, Enum) else role)


@dataclass(frozen=True)
class Share:
    """The part of a pool on one node.

    Attributes:
        pool: name of the pool.
        processes: number of processes.
        bundle: resources of each process.
        divisible: True if the processes may be spread over several nodes.
    """

    pool: str
    processes: int
    bundle: Mapping[str, float]
    divisible: bool = False

    @property
    def total(self) -> dict[str, float]:
        """Total resources of the share's processes."""
        return {name: self.processes * amount for name, amount in self.bundle.items()}

    def pieces(self) -> list[Share]:
        """Return the parts that must each fit on one node."""
        if not self.divisible:
            return [self]
        return [Share(self.pool, 1, self.bundle, divisible=True) for _ in range(self.processes)]


def _shares_of(pools: Iterable[ResourcePool]) -> list[Share]:
    """Return the shares of the pools; a pool and its views count once."""
    bases = {id(base): base for pool in pools for base, _ in pool.places()}
    return [
        Share(base.name, count, base.bundle(), divisible=base.strategy == "PACK")
        for base in bases.values()
        for count in base.process_on_nodes
    ]


def check_shares(shares: Sequence[Share], nodes: Sequence[NodeResources], now: bool = False) -> None:
    """Check that the nodes can hold the shares.

    The check is necessary, not sufficient: shares that pass may still not fit, because optimal packing is a hard
    problem; shares that fail never fit.

    Raises:
        ResourceError: the cluster can never hold the pools; lists what each pool needs and each node has.
    """
    names = {name for share in shares for name in share.bundle}
    have = "; ".join(node.describe(names) for node in nodes) or "the cluster has no node"
    capacities = [node.free if now and node.free is not None else node.total for node in nodes]
    free = " free" if now else ""
    pieces = [piece for share in shares for piece in share.pieces()]
    for piece in pieces:
        if not any(_fits(piece.total, capacity) for capacity in capacities):
            raise ResourceError(
                f"pool {piece.pool!r} asks for {piece.processes} processes on one node "
                f"({describe_resources(piece.total)}), but no node has them{free}. {have}. {_ADVICE}"
            )
    asked = "; ".join(_describe_pool(name, [s for s in shares if s.pool == name]) for name in _pools(shares))
    for unit in sorted(names):
        complaint = _too_little(
            [piece.total.get(unit, 0.0) for piece in pieces],
            [capacity.get(unit, 0.0) for capacity in capacities],
            (f"{unit}s" if unit in ("CPU", "GPU") else unit) + free,
        )
        if complaint is not None:
            raise ResourceError(f"{complaint}. {asked}. {have}. {_ADVICE}")


def _pools(shares: Iterable[Share]) -> list[str]:
    return list(dict.fromkeys(share.pool for share in shares))


def _describe_pool(name: str, shares: Sequence[Share]) -> str:
    return f"pool {name!r}: {[s.processes for s in shares]} processes, each {describe_resources(shares[0].bundle)}"


def _fits(want: Mapping[str, float], have: Mapping[str, float]) -> bool:
    return all(have.get(name, 0.0) + _SLACK >= amount for name, amount in want.items())


def _too_little(needs: Sequence[float], capacities: Sequence[float], unit: str) -> str | None:
    """Return the reason why shares of these sizes cannot fit on nodes of these capacities; None if none is found."""
    if sum(needs) > sum(capacities) + _SLACK:
        return f"the pools ask for {sum(needs):g} {unit}, the cluster has {sum(capacities):g}"
    for size in sorted({need for need in needs if need > 0}):
        large = sum(need >= size for need in needs)
        room = sum(int((capacity + _SLACK) // size) for capacity in capacities)
        if large > room:
            return (
                f"the pools ask {large} times for {size:g} or more {unit} on one node, the cluster has room for {room}"
            )
    return None


def plan_nodes(shares: Sequence[Share], capacities: Sequence[Mapping[str, float]]) -> list[int] | None:
    """Assign a node to each share without dividing it; see :meth:`ResourcePoolManager.plan`.

    A heuristic, which can fail to find an assignment that exists.
    """
    in_order = range(len(shares))
    largest_first = sorted(in_order, key=lambda i: -max(shares[i].total.values(), default=0.0))
    for order in (in_order, largest_first):
        for apart in (True, False):
            places = _place_in_turn(shares, capacities, order, apart)
            if places is not None:
                return places
    return None


def _place_in_turn(
    shares: Sequence[Share], capacities: Sequence[Mapping[str, float]], order: Sequence[int], apart: bool
) -> list[int] | None:
    left = [dict(capacity) for capacity in capacities]
    used: set[tuple[str, int]] = set()
    places = [-1] * len(shares)
    for number in order:
        share, want = shares[number], shares[number].total
        fitting = [node for node in range(len(left)) if _fits(want, left[node])]
        fresh = [node for node in fitting if share.divisible or (share.pool, node) not in used]
        if not fitting or (apart and not fresh):
            return None
        node = (fresh or fitting)[0]
        for name, amount in want.items():
            left[node][name] = left[node].get(name, 0.0) - amount
        used.add((share.pool, node))
        places[number] = node
    return places
