"""Balance of rows over data-parallel ranks by token count.

Mini-batches are formed in ``mini_batches``; this module only chooses the rank of each row.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollcast.protocol import DataProto, Jagged, karmarkar_karp
from rollcast_dispatch.balance import deal_near, exchange_items, plan_shards

__all__ = ["deal_rows", "row_lengths", "seqlen_metrics"]


def row_lengths(batch: DataProto) -> list[int]:
    """Return the number of tokens of each row, prompt and response together.

    The response is measured on its mask: the mask has the same rows and a quarter of the bytes.
    """
    lengths = Jagged.of(batch["prompts"], "prompts").lengths + Jagged.of(batch["response_mask"]).lengths
    sizes: list[int] = lengths.tolist()
    return sizes


def deal_rows(lengths: Sequence[int], parts: int, homes: Sequence[int] | None = None) -> list[list[int]]:
    """Return the row numbers split into ``parts`` parts of equal size, balanced by tokens.

    The heaviest part is never heavier than with round-robin dealing; round-robin is used if it is as good.

    Args:
        lengths: tokens of each row; their number is a multiple of ``parts``.
        parts: number of parts, at least 1.
        homes: part whose rank already holds each row; rows leave their home only as far as the balance needs it.
    """
    in_turn = [list(range(part, len(lengths), parts)) for part in range(parts)]
    if parts == 1 or len(set(lengths)) < 2:
        return in_turn
    balanced = exchange_items(karmarkar_karp(lengths, parts, equal_size=True), lengths)
    even = balanced if max(_tokens(balanced, lengths)) < max(_tokens(in_turn, lengths)) else in_turn
    if homes is None:
        return even
    near = deal_near(_at_home(homes, parts), even, lengths)
    return near if max(_tokens(near, lengths)) <= max(_tokens(in_turn, lengths)) else even


def _at_home(homes: Sequence[int], parts: int) -> list[list[int]]:
    """Return the rows of each part, equally many in each; rows that find no place at home fill the other parts."""
    size = len(homes) // parts
    bins: list[list[int]] = [[] for _ in range(parts)]
    left: list[int] = []
    for row, home in enumerate(homes):
        (bins[home] if len(bins[home]) < size else left).append(row)
    for part in bins:
        places = size - len(part)
        part.extend(left[:places])
        del left[:places]
    return bins


def seqlen_metrics(lengths: Sequence[int], ranks: int) -> dict[str, float]:
    """Return the tokens of a step's rows per rank, under verl's names ``global_seqlen/...``.

    ``min``, ``max`` and ``minmax_diff`` describe the rows in their original order; ``balanced_min`` and
    ``balanced_max`` describe the balanced shards without padding; ``mean`` is the average per rank.
    """
    size = -(-len(lengths) // ranks)
    before = [sum(lengths[start : start + size]) for start in range(0, size * ranks, size)]
    after = [sum(lengths[row] for row in shard.rows) for shard in plan_shards(lengths, ranks, None, equal_size=True)]
    values = {
        "min": min(before),
        "max": max(before),
        "minmax_diff": max(before) - min(before),
        "balanced_min": min(after),
        "balanced_max": max(after),
        "mean": sum(lengths) / ranks,
    }
    return {f"global_seqlen/{name}": float(value) for name, value in values.items()}


def _tokens(parts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[row] for row in part) for part in parts]
