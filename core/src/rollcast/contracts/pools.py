"""Resource pools: numbers of processes on nodes, which a runtime places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rollcast.errors import ResourceError

__all__ = ["NodeResources", "ResourcePool", "ResourcePoolView", "describe_resources"]

_STRATEGIES = ("STRICT_PACK", "PACK")
#: Options that must be equal in all pools of a view, because a process of the view may belong to any of the pools.
_COMMON = ("use_gpu", "accelerator", "cpus_per_process", "max_colocate_count", "detached")


def describe_resources(amounts: Mapping[str, float], names: Iterable[str] = ()) -> str:
    """Format amounts as ``2 CPUs, 1 GPUs``, then the other resources in ``names`` (default: all of ``amounts``)."""
    words = [f"{amounts.get(unit, 0):g} {unit}s" for unit in ("CPU", "GPU")]
    others = sorted({*(names or amounts)} - {"CPU", "GPU"})
    return ", ".join([*words, *(f"{amounts.get(name, 0):g} {name}" for name in others)])


@dataclass(frozen=True)
class NodeResources:
    """Resources of a node of the cluster.

    Attributes:
        address: address of the node.
        cpus, gpus: total numbers of CPUs and GPUs.
        others: amounts of further resources by name: ``NPU``, custom resources, accelerator types.
        free: unreserved amounts of all these resources by name; None if unknown.
        node_id: the runtime's id of the node.
    """

    address: str
    cpus: float
    gpus: float
    others: Mapping[str, float] = field(default_factory=dict)
    free: Mapping[str, float] | None = None
    node_id: str = ""

    @property
    def total(self) -> dict[str, float]:
        """Total amounts of all resources, by name."""
        return {**self.others, "CPU": self.cpus, "GPU": self.gpus}

    def describe(self, names: Iterable[str]) -> str:
        """Format the node as ``node 10.0.0.1: 8 CPUs, 2 GPUs (free: 7 CPUs, 0 GPUs)``, with the resources ``names``."""
        names = {"CPU", "GPU", *names}
        free = "" if self.free is None else f" (free: {describe_resources(self.free, names)})"
        return f"node {self.address}: {describe_resources(self.total, names)}{free}"


class ResourcePool:
    """A reservation of processes on nodes, one per rank.

    Args:
        process_on_nodes: number of processes on each node, such as ``[8, 8]``.
        use_gpu: True to reserve one accelerator per process; False for CPU only.
        max_colocate_count: largest number of groups that may share the pool's devices; each process of a group
            reserves one such fraction of a device.
        name: name of the pool, used in messages and for placement groups.
        cpus_per_process: CPU cores that a process reserves with the cluster's scheduler.
        accelerator: resource name of the device; see :class:`rollcast.contracts.device.Device`.
        accelerator_type: type of device that a node must have, such as ``H100``.
        resources: custom resources that each process reserves, by name.
        strategy: ``STRICT_PACK`` keeps the processes of one entry of ``process_on_nodes`` on one node;
            ``PACK`` does so if possible.
        detached: True if the reservation outlives this process.

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
        """Return each rank's index on its node."""
        return [local for count in self.process_on_nodes for local in range(count)]

    def local_world_size_list(self) -> list[int]:
        """Return for each rank the number of processes on its node."""
        return [count for count in self.process_on_nodes for _ in range(count)]

    def bundle(self) -> dict[str, float]:
        """Return the amounts that one process reserves, by resource name."""
        wanted = {"CPU": self.cpus_per_process} if self.cpus_per_process else {}
        if self.use_gpu:
            wanted[self.accelerator] = 1.0
        if self.accelerator_type is not None:
            # A node has 1 unit of its accelerator type, whatever its number of devices, so each process reserves a
            # tiny part of the unit.
            wanted[f"accelerator_type:{self.accelerator_type}"] = 0.001
        return {**wanted, **self.resources}

    def places(self) -> list[tuple[ResourcePool, int]]:
        """Return for each rank the pool that reserves its process, and the process's index in that pool."""
        return [(self, number) for number in range(self.world_size)]

    def split(self, sizes: int | Sequence[int]) -> list[ResourcePoolView]:
        """Split the pool into views of consecutive processes, which keep their reservations.

        Args:
            sizes: number of processes of each part; a single number for parts of equal size.

        Raises:
            ResourceError: the sizes do not add up to the number of processes of the pool.
        """
        if isinstance(sizes, int):
            parts = [sizes] * (self.world_size // sizes if sizes > 0 else 0)
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
        """Merge this pool and ``others`` into one view; the processes keep their reservations.

        Raises:
            ResourceError: the pools reserve different resources per process, or have a process in common.
        """
        pools = (self, *others)
        places = [place for pool in pools for place in pool.places()]
        return ResourcePoolView(name or "+".join(pool.name for pool in pools), places)

    def __repr__(self) -> str:
        device = self.accelerator.lower() if self.use_gpu else "cpu"
        return f"{type(self).__name__}({list(self.process_on_nodes)}, {device}, name={self.name!r})"


class ResourcePoolView(ResourcePool):
    """A view of processes of one or several other pools, which hold the reservations.

    A group on a view and a group on the underlying pool share devices like two groups on one pool.

    Args:
        name: name of the view, used in messages.
        places: see :meth:`ResourcePool.places`.

    Raises:
        ResourceError: the underlying pools reserve different resources per process, or a process occurs twice.
    """

    def __init__(self, name: str, places: Sequence[tuple[ResourcePool, int]]) -> None:
        if len({(id(base), number) for base, number in places}) < len(places):
            raise ResourceError(f"pool {name!r} would have a process twice; merge pools that have none in common")
        bases = list({id(base): base for base, _ in places}.values())
        for option in _COMMON:
            values = {base.name: getattr(base, option) for base in bases}
            if len(set(values.values())) > 1:
                raise ResourceError(f"pools with different {option} cannot be one: {values}")
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
        node_of: dict[int, list[int]] = {}
        for base, number in self._places:
            if id(base) not in node_of:
                node_of[id(base)] = [node for node, count in enumerate(base.process_on_nodes) for _ in range(count)]
            key = (id(base), node_of[id(base)][number])
            counts[key] = counts.get(key, 0) + 1
        return list(counts.values())

    def places(self) -> list[tuple[ResourcePool, int]]:
        return list(self._places)
