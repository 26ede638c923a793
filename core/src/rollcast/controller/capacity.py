"""What nodes have, what pools want of them, and whether the one can hold the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rollcast.errors import ResourceError

__all__ = ["NodeResources", "Share", "check_shares", "describe", "describe_node", "plan_nodes"]

_SLACK = 1e-6  # sums of fractions of a core
_ADVICE = "Lower placement.n_gpus_per_node or placement.nnodes, or join a larger cluster"


@dataclass(frozen=True)
class NodeResources:
    """What a node of the cluster has.

    Attributes:
        address: of the node.
        cpus, gpus: in all.
        others: further resources by Ray's names: ``NPU``, custom ones, accelerator types.
        free: of all of these, what nobody holds; None where that is not known.
        node_id: the runtime's own name for the node.
    """

    address: str
    cpus: float
    gpus: float
    others: Mapping[str, float] = field(default_factory=dict)
    free: Mapping[str, float] | None = None
    node_id: str = ""

    @property
    def total(self) -> dict[str, float]:
        """All resources by name."""
        return {**self.others, "CPU": self.cpus, "GPU": self.gpus}


@dataclass(frozen=True)
class Share:
    """What a pool wants of one node.

    Attributes:
        pool: its name.
        processes: how many.
        bundle: resources of each process.
        divisible: the processes may also lie on several nodes.
    """

    pool: str
    processes: int
    bundle: Mapping[str, float]
    divisible: bool = False

    @property
    def total(self) -> dict[str, float]:
        """Resources of all its processes."""
        return {name: self.processes * amount for name, amount in self.bundle.items()}

    def pieces(self) -> list[Share]:
        """The parts that have to lie on one node each."""
        if not self.divisible:
            return [self]
        return [Share(self.pool, 1, self.bundle, divisible=True) for _ in range(self.processes)]


def describe(amounts: Mapping[str, float], names: Iterable[str] = ()) -> str:
    """``2 CPUs, 1 GPUs``, then the others of ``names`` (by default those in ``amounts``)."""
    words = [f"{amounts.get(unit, 0):g} {unit}s" for unit in ("CPU", "GPU")]
    others = sorted({*(names or amounts)} - {"CPU", "GPU"})
    return ", ".join([*words, *(f"{amounts.get(name, 0):g} {name}" for name in others)])


def describe_node(node: NodeResources, names: Iterable[str]) -> str:
    """``node 10.0.0.1: 8 CPUs, 2 GPUs (free: 7 CPUs, 0 GPUs)``, with the resources of these names."""
    names = {"CPU", "GPU", *names}
    free = "" if node.free is None else f" (free: {describe(node.free, names)})"
    return f"node {node.address}: {describe(node.total, names)}{free}"


def check_shares(shares: Sequence[Share], nodes: Sequence[NodeResources], now: bool = False) -> None:
    """Refuse shares that the nodes cannot hold.

    What it lets pass may still not fit, because finding the best packing is a hard problem; what it
    refuses never fits.

    Args:
        shares: of all pools.
        nodes: of the cluster.
        now: count what is free at present, where that is known; otherwise what the nodes have in all.

    Raises:
        ResourceError: with what each pool asks for and what each node has.
    """
    names = {name for share in shares for name in share.bundle}
    have = "; ".join(describe_node(node, names) for node in nodes) or "the cluster has no node"
    capacities = [node.free if now and node.free is not None else node.total for node in nodes]
    free = " free" if now else ""
    pieces = [piece for share in shares for piece in share.pieces()]
    for piece in pieces:
        if not any(_fits(piece.total, capacity) for capacity in capacities):
            raise ResourceError(
                f"pool {piece.pool!r} asks for {piece.processes} processes on one node ({describe(piece.total)}), "
                f"but no node has them{free}. {have}. {_ADVICE}"
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
    return f"pool {name!r}: {[s.processes for s in shares]} processes, each {describe(shares[0].bundle)}"


def _fits(want: Mapping[str, float], have: Mapping[str, float]) -> bool:
    return all(have.get(name, 0.0) + _SLACK >= amount for name, amount in want.items())


def _too_little(needs: Sequence[float], capacities: Sequence[float], unit: str) -> str | None:
    """Why shares of these sizes cannot lie on nodes of these capacities; None if nothing speaks against it."""
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
    """A node for each share: always the same one for the same question.

    A pool's shares go to different nodes where that is possible, and to the first nodes that have
    room. It finds no plan for some questions that have one.

    Args:
        shares: none of them is divided here; see :meth:`Share.pieces`.
        capacities: what each node can give, in order of preference.

    Returns:
        An index into ``capacities`` for each share, or None.
    """
    in_order = range(len(shares))
    largest_first = sorted(in_order, key=lambda i: -max(shares[i].total.values(), default=0.0))
    for order in (in_order, largest_first):
        for apart in (True, False):
            found = _place_in_turn(shares, capacities, order, apart)
            if found is not None:
                return found
    return None


def _place_in_turn(
    shares: Sequence[Share], capacities: Sequence[Mapping[str, float]], order: Sequence[int], apart: bool
) -> list[int] | None:
    left = [dict(capacity) for capacity in capacities]
    used: set[tuple[str, int]] = set()
    found = [-1] * len(shares)
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
        found[number] = node
    return found
