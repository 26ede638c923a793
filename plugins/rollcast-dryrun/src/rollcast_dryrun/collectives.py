"""Collectives of a fake process group: their kind, group and bytes, and what one rank knows of the result."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rollcast_dryrun.record import Collective
from rollcast_dryrun.schemas import leaves_of
from rollcast_dryrun.values import forget, get_value

__all__ = ["describe", "own_value"]

#: Part of an operation's name → the name of the collective; the first match counts.
_KINDS = {
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
}
#: Returns the group of a name, which the collectives of compiled code take.
_resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]


def _kind(func: Any) -> str | None:
    name = func._schema.name.rpartition("::")[2]
    return next((kind for part, kind in _KINDS.items() if part in name), None)


def _group(args: tuple[Any, ...]) -> Any:
    """Return the process group among the arguments of an operation."""
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
        if isinstance(value, str) and value not in ("sum", "avg", "max", "min", "product"):
            return _resolve(value)
    return None


def describe(func: Any, args: tuple[Any, ...], node_ranks: int) -> tuple[Collective | None, int]:
    """Return a collective and the bytes of its largest side; no collective for other operations, such as a wait."""
    kind, group = _kind(func), _group(args)
    if kind is None or group is None:
        return None, 0
    ranks = dist.get_process_group_ranks(group)
    sides = [leaves_of(value) for value in args]
    nbytes = max((sum(leaf.nbytes for leaf in side if isinstance(leaf, torch.Tensor)) for side in sides), default=0)
    nodes = {rank // node_ranks for rank in ranks}
    return Collective(kind, len(ranks), len(nodes) > 1, abs(ranks[-1] - ranks[0]) // max(len(ranks) - 1, 1)), nbytes


def own_value(collective: Collective, args: tuple[Any, ...]) -> None:
    """Set the values of a collective's result as if every rank had sent what this one did; else make them unknown."""
    if collective.kind == "broadcast":
        return
    sides = [[leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)] for value in args]
    targets, *sources = [side for side in sides if side] or [[]]
    known = all(get_value(tensor) is not None for side in (targets, *sources) for tensor in side)
    if known and collective.kind == "all_reduce":
        for value in map(get_value, targets):
            if value is not None and _sums(args):
                value.mul_(collective.ranks)
    elif known and collective.kind == "all_gather" and len(sources) == 1:
        mine = get_value(sources[0][0])
        for value in map(get_value, targets):
            if value is not None and mine is not None:
                value.view(-1).copy_(mine.reshape(-1).repeat(value.numel() // max(mine.numel(), 1)))
    else:
        for tensor in targets:
            forget(tensor)


def _sums(args: tuple[Any, ...]) -> bool:
    """Return True if a reduction adds up, instead of taking the mean or an extreme."""
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ReduceOp" in str(value._type()):
            return bool(value.op() == dist.ReduceOp.SUM)  # type: ignore[attr-defined]
    return "sum" in args
