"""The mappings that planners search: partitions of roles, allocations of devices, meshes and micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from rollcast_automap.composition import modes_of
from rollcast_automap.contract import Mesh, Mode, Placement, Pool, Problem, RoleSpec

__all__ = [
    "Groups",
    "Share",
    "allocate",
    "count_kinds",
    "homes_of",
    "list_meshes",
    "list_micro_batches",
    "list_partitions",
    "list_placements",
    "list_shares",
    "list_stalenesses",
    "partitions",
]

#: Up to this number of devices every pool size is tried; beyond it, 2^a and 3 * 2^a, and the whole cluster.
EVERY_SIZE = 16
#: Kind of the devices of a pool ("" for several kinds), and their number.
Share = tuple[str, int]
#: Roles that share a pool, for each pool.
Groups = tuple[tuple[str, ...], ...]


def partitions(names: Sequence[str]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yield the set partitions of ``names`` in a fixed order."""
    if not names:
        yield ()
        return
    first, rest = names[0], names[1:]
    for partition in partitions(rest):
        yield ((first,), *partition)
        for index, group in enumerate(partition):
            yield (*partition[:index], (first, *group), *partition[index + 1 :])


def homes_of(groups: Groups) -> dict[str, str]:
    """Return role → name of its pool."""
    return {role: f"pool_{index}" for index, group in enumerate(groups) for role in group}


def list_partitions(problem: Problem) -> Iterator[tuple[Groups, Mode]]:
    """Yield the partitions of the roles that obey the constraints, with each mode that is possible there."""
    for groups in partitions([role.name for role in problem.roles]):
        if _is_allowed(problem, groups):
            for mode in modes_of(problem, homes_of(groups)):
                yield groups, mode


def list_stalenesses(problem: Problem, mode: Mode) -> range:
    """Return the values of ``max_staleness`` that a mode allows.

    Generation runs ahead only on devices of its own. On shared devices, generation and training would slow each other
    down by as much as they overlap.
    """
    return range(problem.constraints.max_staleness + 1 if mode == "standalone" else 1)


def _is_allowed(problem: Problem, groups: Sequence[Sequence[str]]) -> bool:
    """Return True if a partition obeys the constraints on colocation."""
    home = {role: index for index, group in enumerate(groups) for role in group}
    limits = problem.constraints
    apart = all(home.get(a, -1) != home.get(b, -2) for a, b in limits.forbidden)
    return apart and all(home.get(a) == home.get(b) for a, b in limits.together)


def list_shares(problem: Problem, group: Sequence[str]) -> list[Share]:
    """Return the shares of the cluster that a group of roles may get."""
    counts: dict[str, int] = {}
    for node in problem.cluster.nodes:
        counts[node.kind.name] = counts.get(node.kind.name, 0) + node.devices
    if len(counts) > 1:
        counts[""] = problem.cluster.devices
    pinned = {problem.constraints.pinned[role] for role in group if role in problem.constraints.pinned}
    shares = [(kind, size) for kind, count in sorted(counts.items()) for size in _sizes(count)]
    if pinned:
        return [
            (kind, max(pinned)) for kind, count in sorted(counts.items()) if len(pinned) == 1 and max(pinned) <= count
        ]
    return shares


def _sizes(count: int) -> list[int]:
    if count <= EVERY_SIZE:
        return list(range(1, count + 1))
    grid = {step * 2**power for step in (1, 3) for power in range(count.bit_length()) if step * 2**power <= count}
    return sorted({*grid, count})


def allocate(problem: Problem, shares: Sequence[Share]) -> tuple[Pool, ...] | None:
    """Return pools of these shares; None if they do not fit beside each other.

    Large pools are allocated first, pools of several kinds last. A pool is put on the first node that can hold all of
    it, else on the nodes with the most free devices. Two cases are rejected because other shares cover them: a pool of
    several kinds that would fit on one kind, and as many pools of several kinds as there are kinds, since such pools
    could exchange devices until one of them has a single kind.
    """
    nodes = problem.cluster.nodes
    free = [node.devices for node in nodes]
    if sum(kind == "" for kind, _ in shares) > max(count_kinds(problem) - 1, 0):
        return None
    pools: dict[int, Pool] = {}
    order = sorted(range(len(shares)), key=lambda index: (shares[index][0] == "", -shares[index][1], index))
    for index in order:
        kind, size = shares[index]
        mine = [number for number, node in enumerate(nodes) if kind in ("", node.kind.name) and free[number]]
        whole = next((number for number in mine if free[number] >= size), None)
        if whole is not None:
            places = [(whole, size)]
        else:
            places, left = [], size
            for number in sorted(mine, key=lambda number: (-free[number], number)):
                count = min(free[number], left)
                left -= count
                places += [(number, count)] if count else []
            if left:
                return None
        if kind == "" and len({nodes[number].kind.name for number, _ in places}) == 1:
            return None
        for number, count in places:
            free[number] -= count
        pools[index] = Pool(f"pool_{index}", tuple(sorted(places)))
    return tuple(pools[index] for index in range(len(shares)))


def count_kinds(problem: Problem) -> int:
    """Return the number of device kinds in the cluster."""
    return len({node.kind.name for node in problem.cluster.nodes})


def list_meshes(problem: Problem, role: RoleSpec, pool: Pool) -> list[Mesh]:
    """Return the meshes of a role on a pool: tensor parallelism within a node, stages of equal size."""
    devices, narrow = pool.devices, min(pool.process_on_nodes)
    if role.name in problem.constraints.meshes:
        return [mesh for mesh in problem.constraints.meshes[role.name] if mesh.size == devices]
    tensors = [size for size in range(1, narrow + 1) if devices % size == 0 and role.model.heads % size == 0]
    chunks = role.training.pipeline_chunks if role.training is not None else 1
    meshes = []
    for tensor, pipeline in itertools.product(tensors, range(1, devices + 1)):
        data = devices // (tensor * pipeline)
        # Engines refuse chunks in a single stage.
        single = pipeline == 1 and (chunks == 1 or role.kind == "generates")
        staged = pipeline > 1 and role.kind != "generates" and role.model.layers % (pipeline * chunks) == 0
        if data * tensor * pipeline == devices and (single or staged) and data <= problem.rows:
            meshes.append(Mesh(data, tensor, pipeline))
    return meshes


def list_micro_batches(problem: Problem, role: RoleSpec, mesh: Mesh) -> list[int]:
    """Return the micro-batch sizes to try, in rows: powers of 2, and all rows of a rank."""
    batches = problem.mini_batches if role.kind == "trains" else 1
    rows = -(-problem.rows // (batches * mesh.data))
    powers = [2**power for power in range(20) if 2**power < rows]
    return [*powers, rows]


def list_placements(problem: Problem, role: RoleSpec, pool: Pool) -> list[Placement]:
    """Return the placements of a role on a pool."""
    return [
        Placement(role.name, pool.name, mesh, rows)
        for mesh in list_meshes(problem, role, pool)
        for rows in list_micro_batches(problem, role, mesh)
    ]
