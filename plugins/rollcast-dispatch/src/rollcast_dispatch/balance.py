"""Assignment of rows of different lengths to shards with nearly equal numbers of tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from rollcast.protocol import karmarkar_karp

__all__ = ["Shard", "deal_near", "exchange_items", "plan_shards"]

#: Ratio of the heaviest shard's tokens to the best balance up to which rows stay in their runs.
_TOLERANCE = 1.01
#: Number of light parts with which the heaviest part tries to swap.
_TRIED = 16


def exchange_items(
    parts: Sequence[list[int]], weights: Sequence[int], enough: float = -1, tried: int = 1
) -> list[list[int]]:
    """Swap items between parts, keeping the sizes of the parts, so that the heaviest part becomes lighter.

    If all parts must have the same size, one very heavy item can make its part too heavy. So, as long as it helps, the
    heaviest and the lightest part swap the pair of items that balances them best.

    Args:
        parts: items of each part.
        weights: weight of each item.
        enough: weight of the heaviest part at which swapping stops.
        tried: number of light parts with which the heaviest part tries to swap.
    """
    swapped = [sorted(part, key=lambda item: weights[item]) for part in parts]
    loads = [sum(weights[item] for item in part) for part in swapped]
    for _ in range(4 * len(parts)):
        high = loads.index(max(loads))
        if loads[high] <= enough:
            break
        for low in heapq.nsmallest(tried, range(len(loads)), key=loads.__getitem__):
            swap = _best_swap(swapped[high], swapped[low], loads[high] - loads[low], weights)
            if swap is not None:
                break
        else:
            break
        i, j = swap
        moved = weights[swapped[high][i]] - weights[swapped[low][j]]
        swapped[high][i], swapped[low][j] = swapped[low][j], swapped[high][i]
        for part, change in ((high, -moved), (low, moved)):
            swapped[part].sort(key=lambda item: weights[item])
            loads[part] += change
    return [sorted(part) for part in swapped]


def _best_swap(high: list[int], low: list[int], gap: int, weights: Sequence[int]) -> tuple[int, int] | None:
    """Return the positions of the items whose swap reduces ``gap`` most; None if no swap helps. Parts are sorted."""
    best, least, j = None, gap, 0
    for i, item in enumerate(high):
        # The remaining gap is |gap - 2 * moved|, so heavier items of one part pair with heavier ones of the other.
        while j + 1 < len(low) and 2 * (weights[item] - weights[low[j + 1]]) >= gap:
            j += 1
        for k in (j, j + 1):
            remaining = abs(gap - 2 * (weights[item] - weights[low[k]])) if k < len(low) else gap
            if remaining < least:
                best, least = (i, k), remaining
    return best


def deal_near(homes: Sequence[Sequence[int]], even: Sequence[list[int]], weights: Sequence[int]) -> list[list[int]]:
    """Return parts in which few items leave their home if these are about as balanced as ``even``, else ``even``.

    Args:
        homes: items of each part before balancing, with the part sizes of ``even``.
        even: the best balanced parts known.
        weights: weight of each item.
    """
    enough = _TOLERANCE * max(sum(weights[item] for item in part) for part in even)
    near = exchange_items([list(home) for home in homes], weights, enough, _TRIED)
    heaviest = max(sum(weights[item] for item in part) for part in near)
    return near if heaviest <= enough else [list(part) for part in even]


@dataclass(frozen=True)
class Shard:
    """The rows of a shard.

    Attributes:
        rows: row numbers, ascending.
        padding: row numbers to repeat after the rows.
    """

    rows: list[int]
    padding: list[int]


def plan_shards(
    lengths: Sequence[int], shards: int, groups: Sequence[Sequence[int]] | None, equal_size: bool
) -> list[Shard]:
    """Assign every row to a shard.

    Remote rows are stored on the ranks in consecutive runs, as an earlier call returned them. Runs that are
    balanced well enough are kept, because they need no copy. Otherwise, only as many rows leave their run as the
    balance requires, because such rows are mostly read from another node.

    Args:
        lengths: tokens of each row.
        shards: number of shards.
        groups: row numbers to keep together; None if there are no groups.
        equal_size: True to pad shards to the same number of rows. Padding repeats the shortest row; with groups, the
            shortest row of another shard, so that a group never contains its own copies.
    """
    items = [[row] for row in range(len(lengths))] if groups is None else [list(group) for group in groups]

    def padded(parts: Sequence[list[int]]) -> list[Shard]:
        return _pad(parts, lengths, max(map(len, parts)) if equal_size else 0, apart=groups is not None)

    balanced = padded(_balance(lengths, shards, items, equal_size))
    runs = _cut(len(lengths), shards, equal_size)
    owner = {row: number for number, run in enumerate(runs) for row in run}
    if groups is None or all(len({owner[row] for row in item}) == 1 for item in items):
        consecutive = padded(runs)
        if _heaviest(consecutive, lengths) <= _heaviest(balanced, lengths):
            return consecutive
    return balanced


def _balance(lengths: Sequence[int], shards: int, items: list[list[int]], equal_size: bool) -> list[list[int]]:
    weights = [sum(lengths[row] for row in item) for item in items]
    sizes = {len(item) for item in items}
    even = equal_size and len(sizes) == 1
    # Items of one size are assigned in equal numbers; missing items are filled with the shortest row.
    missing = -len(items) % shards if even else 0
    if even:
        weights += [sizes.pop() * min(lengths)] * missing
    dealt = karmarkar_karp(weights, shards, even)
    if even:
        dealt = exchange_items(dealt, weights)
        homes = _homes(items, len(lengths), shards, missing)
        dealt = dealt if homes is None else deal_near(homes, dealt, weights)
    return [sorted(row for number in part if number < len(items) for row in items[number]) for part in dealt]


def _homes(items: list[list[int]], rows: int, shards: int, missing: int) -> list[list[int]] | None:
    """Return the items of each run of rows, filling short runs with missing items; None if a run cuts an item.

    Args:
        items: items with the same number of rows each.
        missing: number of items to add, numbered after the others.
    """
    size = (len(items) + missing) // shards
    owner = {row: number for number, run in enumerate(_cut(rows, shards, True)) for row in run}
    homes: list[list[int]] = [[] for _ in range(shards)]
    for number, item in enumerate(items):
        owners = {owner[row] for row in item}
        if len(owners) > 1:
            return None
        homes[owners.pop()].append(number)
    made_up = iter(range(len(items), len(items) + missing))
    for home in homes:
        if len(home) > size:
            return None
        home += [next(made_up) for _ in range(size - len(home))]
    return homes


def _cut(rows: int, shards: int, equal_size: bool) -> list[list[int]]:
    if equal_size:
        size = -(-rows // shards)
        bounds = [min(number * size, rows) for number in range(shards + 1)]
    else:
        bounds = [number * rows // shards for number in range(shards + 1)]
    return [list(range(bounds[number], bounds[number + 1])) for number in range(shards)]


def _pad(parts: Sequence[list[int]], lengths: Sequence[int], size: int, apart: bool) -> list[Shard]:
    """Pad shards to at least ``size`` rows; if ``apart``, padding repeats no row of the same shard."""
    by_length = sorted(range(len(lengths)), key=lambda row: lengths[row])

    def padding(rows: list[int]) -> list[int]:
        if len(rows) >= size:
            return []
        own = set(rows) if apart else ()
        return [next(row for row in by_length if row not in own)] * (size - len(rows))

    return [Shard(rows, padding(rows)) for rows in parts]


def _heaviest(shards: Sequence[Shard], lengths: Sequence[int]) -> int:
    return max(sum(lengths[row] for row in (*shard.rows, *shard.padding)) for shard in shards)
