"""Resource pools on Ray: placement groups and their bundles."""

from __future__ import annotations

import re
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

from rollcast import ResourcePoolManager
from rollcast.contracts.pools import NodeResources, ResourcePool, describe_resources
from rollcast.errors import ResourceError
from rollcast_ray.ray_internals import available_resources_per_node, placement_group_id

__all__ = ["Placements", "RayResourcePool", "Slot", "check_room", "read_nodes", "remove_groups_made_by"]


@dataclass(frozen=True)
class Slot:
    """A bundle of a placement group, for one process.

    Attributes:
        group, bundle: placement group, and index of the bundle in it.
        node, node_id: address and id of the bundle's node.
    """

    group: Any
    bundle: int
    node: str
    node_id: str

    @property
    def key(self) -> tuple[str, int]:
        """Identity of this slot."""
        return self.group.id.hex(), self.bundle


def read_nodes() -> list[NodeResources]:
    """Return the nodes of the cluster, by address."""
    free = available_resources_per_node()
    nodes = [
        NodeResources(
            node["NodeManagerAddress"],
            float(node["Resources"].get("CPU", 0)),
            float(node["Resources"].get("GPU", 0)),
            _nameable(node["Resources"]),
            free.get(node["NodeID"]),
            node["NodeID"],
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: _natural(node.address))


def _nameable(resources: dict[str, float]) -> dict[str, float]:
    """Return the resources that a pool can request by name."""
    own = ("CPU", "GPU", "memory", "object_store_memory")
    return {k: float(v) for k, v in resources.items() if k not in own and not re.match(r"node:|.*_group_", k)}


def _natural(address: str) -> list[str | int]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", address)]


def _owner_prefix(actor_id: str) -> str:
    """Return the name prefix of placement groups created by an actor, or by a driver if ``actor_id`` is empty."""
    return f"rollcast:{actor_id or 'driver'}:"


def remove_groups_made_by(actor_ids: Iterable[str]) -> None:
    """Remove the placement groups of dead actors, which Ray would keep until the driver ends."""
    prefixes = tuple(_owner_prefix(actor_id) for actor_id in actor_ids)
    for key, entry in placement_group_table().items():
        if entry["name"].startswith(prefixes) and entry["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(placement_group_id(key)))


#: Time in seconds for which a pool waits for its preferred nodes.
_HOME_S = 3.0
#: Pools placed by this process.
_in_place: weakref.WeakSet[RayResourcePool] = weakref.WeakSet()


class RayResourcePool(ResourcePool):
    """A resource pool with one Ray placement group per node, created on first use.

    Each process has its own bundle. The groups are sorted by node address and are created on the same nodes for equal
    pools, so that ranks stay on their nodes after a restart.
    """

    _slots: list[Slot] | None = None

    @classmethod
    def like(cls, pool: ResourcePool, detached: bool) -> RayResourcePool:
        """Return an unplaced pool with the same description."""
        return cls(
            pool.process_on_nodes,
            pool.use_gpu,
            pool.max_colocate_count,
            pool.name,
            pool.cpus_per_process,
            accelerator=pool.accelerator,
            accelerator_type=pool.accelerator_type,
            resources=pool.resources,
            strategy=pool.strategy,
            detached=detached,
        )

    @property
    def is_placed(self) -> bool:
        """True if the placement groups have been created."""
        return self._slots is not None

    def get_slots(self, timeout: float = 300.0, deadline: float | None = None) -> list[Slot]:
        """Return a slot for each process, sorted by node address.

        Args:
            timeout: limit in seconds.
            deadline: time of :func:`time.monotonic` at which the limit ends; by default ``timeout`` from now.

        Raises:
            ResourceError: the pool was not placed within ``timeout`` seconds; names the request, the number of
                missing nodes, and the resources of each node.
        """
        if self._slots is None:
            self._slots = self._place(timeout, time.monotonic() + timeout if deadline is None else deadline)
            _in_place.add(self)
        return self._slots

    def get_placement_groups(self, timeout: float = 300.0) -> list[Any]:
        """Return the placement groups, sorted by node address.

        Raises:
            ResourceError: see :meth:`get_slots`.
        """
        self.get_slots(timeout)
        return list(self.groups_by_id().values())

    def groups_by_id(self) -> dict[str, Any]:
        """Return the created placement groups by id."""
        return {slot.key[0]: slot.group for slot in self._slots or ()}

    def release(self) -> None:
        """Release the placement groups."""
        for group in self.groups_by_id().values():
            remove_placement_group(group)
        self.forget()

    def replace_lost(self, timeout: float, deadline: float) -> None:
        """Replace the slots on lost nodes, in the same order; the other slots stay.

        Args:
            timeout: limit in seconds.
            deadline: time of :func:`time.monotonic` at which the limit ends.

        Raises:
            ResourceError: no place was found within ``timeout`` seconds.
        """
        alive = {node.node_id for node in read_nodes()}
        lost = {slot.key[0]: slot.group for slot in self._slots or () if slot.node_id not in alive}
        if not lost:
            return
        replaced = {}
        for key, group in lost.items():
            size = sum(slot.key[0] == key for slot in self._slots or ())
            if self.strategy == "STRICT_PACK":
                # The whole group was on the lost node, and its bundles may be bound to the node's address.
                remove_placement_group(group)
                replaced[key] = self._make_group(size, None)
            else:
                replaced[key] = group  # Ray reschedules the lost bundles itself
        self._wait(list(replaced.values()), timeout, deadline)
        fresh = {key: iter(_slots_of([group])) for key, group in replaced.items()}
        self._slots = [next(fresh[slot.key[0]]) if slot.key[0] in fresh else slot for slot in self._slots or ()]

    def forget(self) -> None:
        """Forget the placement groups without releasing them."""
        self._slots = None
        _in_place.discard(self)

    def _place(self, timeout: float, deadline: float) -> list[Slot]:
        targets = self._targets()
        groups = [self._make_group(*entry) for entry in zip(self.process_on_nodes, targets, strict=True)]
        try:
            grace = time.monotonic() + min(_HOME_S, timeout / 2)
            for number, target in enumerate(targets):
                if target is not None and not groups[number].wait(max(grace - time.monotonic(), 0.001)):
                    # Another pool occupies the preferred nodes.
                    remove_placement_group(groups[number])
                    groups[number] = self._make_group(self.process_on_nodes[number], None)
            self._wait(groups, timeout, deadline)
            return _slots_of(groups)
        except BaseException:
            for group in groups:
                remove_placement_group(group)
            raise

    def _make_group(self, processes: int, address: str | None) -> Any:
        bundles = [self.bundle() for _ in range(processes)]
        if address is not None:
            bundles[0][f"node:{address}"] = 0.001
        creator = ray.get_runtime_context().get_actor_id() or ""
        return placement_group(
            bundles,
            strategy=self.strategy,
            name=f"{_owner_prefix(creator)}{self.name}:{uuid.uuid4().hex}",
            lifetime="detached" if self.detached else None,
        )

    def _targets(self) -> list[str | None]:
        """Return the preferred node address of each group, the same for equal pools as far as this process knows."""
        nodes = read_nodes()
        # Do not use Ray's free resources, which lag behind the end of a pool and would move the next pool.
        left = {node.node_id: node.total for node in nodes}
        for pool in _in_place:
            for slot in pool.get_slots():
                held = left.setdefault(slot.node_id, {})
                for name, amount in pool.bundle().items():
                    held[name] = held.get(name, 0.0) - amount
        manager = ResourcePoolManager({self.name: self}, {})
        plan = manager.plan([left[node.node_id] for node in nodes]) if self.strategy == "STRICT_PACK" else None
        if plan is None or len(nodes) == 1 or len({node.address for node in nodes}) < len(nodes):
            return [None] * len(self.process_on_nodes)
        return [nodes[number].address for number in plan]

    def _wait(self, groups: Sequence[Any], timeout: float, deadline: float) -> None:
        placed = [group.wait(max(deadline - time.monotonic(), 0.001)) for group in groups]
        if all(placed):
            return
        bundle = self.bundle()
        waiting = [
            describe_resources({name: group.bundle_count * amount for name, amount in bundle.items()})
            for group, done in zip(groups, placed, strict=True)
            if not done
        ]
        nodes = "; ".join(node.describe(bundle) for node in read_nodes())
        raise ResourceError(
            f"pool {self.name!r} ({list(self.process_on_nodes)} processes, each {describe_resources(bundle)}) was not "
            f"placed within {timeout:.3g} s; it waits for {len(waiting)} of {len(groups)} nodes, for "
            f"{' and '.join(waiting)} free on one node. {nodes or 'no node'}"
        )


def _slots_of(groups: Sequence[Any]) -> list[Slot]:
    addresses = {node.node_id: node.address for node in read_nodes()}
    slots = []
    for group in groups:
        nodes = placement_group_table(group)["bundles_to_node_id"]
        slots += [Slot(group, bundle, addresses.get(nodes[bundle], ""), nodes[bundle]) for bundle in sorted(nodes)]
    return sort_slots(slots)


def sort_slots(slots: Iterable[Slot]) -> list[Slot]:
    """Sort slots by node address; nodes that share an address stay separate, in order of first appearance."""
    slots = list(slots)
    first = {slot.node_id: number for number, slot in reversed(list(enumerate(slots)))}
    return sorted(slots, key=lambda slot: (_natural(slot.node), first[slot.node_id]))


class Placements:
    """The pools that a runtime has placed."""

    def __init__(self) -> None:
        #: The requested pool (kept alive, so that its id stays unique), and the placed pool.
        self._placed: dict[int, tuple[ResourcePool, RayResourcePool]] = {}
        #: Placement groups that other drivers created for detached groups that were attached to here.
        self._adopted: dict[str, Any] = {}
        #: Id of a pool → number of callers that keep it reserved while no group runs on it.
        self._pinned: Counter[int] = Counter()

    def pin(self, pool: ResourcePool) -> None:
        """Keep a pool reserved, whether or not it is placed yet, until :meth:`unpin`."""
        self._pinned.update({id(base) for base, _ in pool.places()})

    def unpin(self, pool: ResourcePool) -> None:
        """Undo one :meth:`pin`."""
        self._pinned.subtract({id(base) for base, _ in pool.places()})

    def slots(self, pool: ResourcePool, detached: bool, timeout: float, deadline: float) -> list[Slot]:
        """Return a slot for each rank of a pool; place the pool first if necessary.

        Args:
            pool: the pool.
            detached: True if the group outlives its driver.
            timeout: limit in seconds, for messages.
            deadline: time of :func:`time.monotonic` at which the limit ends.

        Raises:
            ResourceError: the pool cannot be placed, or does not live as long as a detached group needs.
        """
        bases = {id(base): self._resolve(base, detached) for base, _ in pool.places()}
        missing = [base for base in bases.values() if not base.is_placed]
        if missing:
            pools = {f"{number}": base for number, base in enumerate([*self._in_place(), *missing])}
            ResourcePoolManager(pools, {}).check(read_nodes())
        slots = {key: base.get_slots(timeout, deadline) for key, base in bases.items()}
        return sort_slots(slots[id(base)][number] for base, number in pool.places())

    def _resolve(self, base: ResourcePool, detached: bool) -> RayResourcePool:
        if id(base) in self._placed:
            placed = self._placed[id(base)][1]
        elif isinstance(base, RayResourcePool):
            placed = base
            if not placed.is_placed:
                self._placed[id(base)] = (base, placed)  # placed here, so released here
        else:
            placed = RayResourcePool.like(base, detached or base.detached)
            self._placed[id(base)] = (base, placed)
        if detached and not placed.detached:
            raise ResourceError(
                f"pool {base.name!r} ends with this process, and so would a detached group on it; "
                "create the pool with detached=True"
            )
        return placed

    def replace_lost(self, pool: ResourcePool, timeout: float, deadline: float) -> None:
        """Replace the slots of a pool on lost nodes, before ``deadline``; see :meth:`slots`.

        Raises:
            ResourceError: no place was found within ``timeout`` seconds.
        """
        for base in {id(base): base for base, _ in pool.places()}.values():
            placed = self._placed[id(base)][1] if id(base) in self._placed else base
            if isinstance(placed, RayResourcePool):
                placed.replace_lost(timeout, deadline)

    def owns(self, slots: Iterable[Slot]) -> bool:
        """Return True if the slots are in pools that were placed here, not by the caller."""
        return {slot.key[0] for slot in slots} <= {key for base in self._in_place() for key in base.groups_by_id()}

    def _in_place(self) -> list[RayResourcePool]:
        # Copy to a list first, because another thread may place or release a pool meanwhile.
        return [base for _, base in list(self._placed.values()) if base.is_placed]

    def adopt(self, slots: Iterable[Slot]) -> None:
        """Take over the placement groups of a detached group."""
        self._adopted.update({slot.key[0]: slot.group for slot in slots})

    def has_detached(self) -> bool:
        """Return True if a placement group that outlives its driver is registered here."""
        return bool(self._adopted) or any(base.detached for base in self._in_place())

    def release_all_but(self, used: Collection[str]) -> None:
        """Release the pools that have no placement group in ``used`` (ids)."""
        for key, (_, base) in list(self._placed.items()):
            if self._pinned[key] <= 0 and not set(base.groups_by_id()) & set(used):
                base.release()
                del self._placed[key]
        for group_id in set(self._adopted) - set(used):
            remove_placement_group(self._adopted.pop(group_id))

    def forget(self) -> None:
        """Forget all pools without releasing them."""
        for base in self._in_place():
            base.forget()
        self._placed.clear()
        self._adopted.clear()


def check_room(pool: ResourcePool, slots: Sequence[Slot], held: Sequence[tuple[str, Sequence[Slot]]]) -> None:
    """Check that a further group fits on the devices of a pool.

    Args:
        pool: pool of the further group.
        slots: slots of the further group.
        held: names of the running groups, with their slots.

    Raises:
        ResourceError: the pool is full; names the groups on it.
    """
    wanted = {slot.key for slot in slots}
    there = {name: wanted & {slot.key for slot in places} for name, places in held}
    occupied = Counter(key for keys in there.values() for key in keys)
    if occupied and max(occupied.values()) >= pool.max_colocate_count:
        names = ", ".join(name for name, keys in there.items() if keys)
        raise ResourceError(
            f"pool {pool.name!r} is full: {names} runs there, and max_colocate_count is {pool.max_colocate_count}. "
            "Put the roles into one group, shut a group down first, or raise max_colocate_count"
        )
