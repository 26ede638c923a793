"""Partitioning of items into parts of nearly equal weight, used by dispatch modes and engines for rows."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

__all__ = ["karmarkar_karp"]

#: Members of a part: an item's index, or a pair of members.
_Members = Any
#: Parts of some of the items as (weight, members), heaviest first; parts without items are left out.
_Parts = list[tuple[int, _Members]]


def karmarkar_karp(weights: Sequence[int], parts: int, equal_size: bool) -> list[list[int]]:
    """Partition items into ``parts`` parts of nearly equal weight, by the largest differencing method.

    The heaviest part weighs at most ``max(weights)`` more than the lightest: merging two
    partitions, heaviest parts with lightest, makes no difference larger than it was in either.

    Args:
        weights: weight of each item, at least 0.
        parts: number of parts, at least 1.
        equal_size: True for the same number of items in each part; ``parts`` must divide the number of items.

    Returns:
        The indices of each part's items, ascending; deterministic.
    """
    order = sorted(range(len(weights)), key=lambda item: -weights[item])
    step = parts if equal_size else 1
    heap: list[tuple[int, int, _Parts]] = []
    for number, start in enumerate(range(0, len(order), step)):
        weighted: _Parts = [(weights[item], item) for item in order[start : start + step]]
        heap.append((-_difference(weighted, parts), number, weighted))
    if not heap:
        return [[] for _ in range(parts)]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        merged = _merge(first, heapq.heappop(heap)[2], parts)
        heapq.heappush(heap, (-_difference(merged, parts), number, merged))
        number += 1
    members = [sorted(_flatten(tree)) for _, tree in heap[0][2]]
    return sorted(members, key=lambda items: items[0]) + [[] for _ in range(parts - len(members))]


def _difference(weighted: _Parts, parts: int) -> int:
    return weighted[0][0] - (weighted[-1][0] if len(weighted) == parts else 0)


def _merge(first: _Parts, second: _Parts, parts: int) -> _Parts:
    """Merge two partitions: the heaviest part of one with the lightest part of the other, and so on."""
    alone = parts - len(second)
    merged = first[:alone] + second[: parts - len(first)]
    for (weight, members), (other_weight, others) in zip(first[alone:], reversed(second), strict=False):
        merged.append((weight + other_weight, (members, others)))
    merged.sort(key=lambda part: -part[0])
    return merged


def _flatten(tree: _Members) -> list[int]:
    order, todo = [], [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, tuple):
            todo.extend(node)
        else:
            order.append(node)
    return order
