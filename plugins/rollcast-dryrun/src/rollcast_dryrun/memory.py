"""A model of torch's caching allocator: what a sequence of allocations holds and reserves.

Source: c10/cuda/CUDACachingAllocator.cpp of torch 2.13, with its default settings.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass, field

__all__ = ["CachingAllocator"]

_MIB = 1 << 20
#: Sizes of blocks are multiples of this.
_BLOCK = 512
#: Largest request that is served from segments of ``_SMALL_SEGMENT``.
_SMALL = _MIB
_SMALL_SEGMENT = 2 * _MIB
#: Requests below this share segments of ``_LARGE_SEGMENT``; larger ones get segments of their own.
_MIN_LARGE = 10 * _MIB
_LARGE_SEGMENT = 20 * _MIB
_ROUND_LARGE = 2 * _MIB


@dataclass(eq=False)
class _Block:
    """A part of a segment; its neighbours are the parts before and after it.

    ``uses`` has the last operation of each stream on what the block held before it was freed.
    """

    size: int
    segment: int
    pool: tuple[int, bool]
    free: bool = True
    before: _Block | None = None
    after: _Block | None = None
    uses: dict[int, int] = field(default_factory=dict)


@dataclass
class _Pool:
    """Free blocks of a stream, sorted by size."""

    blocks: list[tuple[int, int, _Block]] = field(default_factory=list)

    def add(self, block: _Block) -> None:
        insort(self.blocks, (block.size, id(block), block))

    def remove(self, block: _Block) -> None:
        del self.blocks[bisect_left(self.blocks, (block.size, id(block)))]

    def best_fit(self, size: int) -> _Block | None:
        place = bisect_left(self.blocks, (size,))
        return None if place == len(self.blocks) else self.blocks[place][2]


class CachingAllocator:
    """Allocations of one device.

    Attributes:
        allocated: bytes of blocks in use.
        reserved: bytes of segments.
        peak_allocated, peak_reserved: their maxima since the last :meth:`reset_peak`.
    """

    def __init__(self) -> None:
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self._pools: dict[tuple[int, bool], _Pool] = defaultdict(_Pool)
        self._segments = 0

    def allocate(self, size: int, stream: int) -> _Block:
        """Return a block for ``size`` bytes, at least one, in the order of ``stream``."""
        wanted = -(-max(size, 1) // _BLOCK) * _BLOCK
        pool = (stream, wanted <= _SMALL)
        block = self._pools[pool].best_fit(wanted)
        if block is None:
            block = self._reserve(wanted, pool)
        else:
            self._pools[pool].remove(block)
        self._split(block, wanted)
        block.free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: _Block, uses: dict[int, int]) -> None:
        """Return a block to its pool, where it merges with free neighbours.

        Args:
            uses: number of the last operation of each stream that used the block.
        """
        block.uses = uses
        self.allocated -= block.size
        block.free = True
        pool = self._pools[block.pool]
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                pool.remove(neighbour)
        if block.before is not None and block.before.free:
            block = self._merge(block.before, block)
        if block.after is not None and block.after.free:
            block = self._merge(block, block.after)
        pool.add(block)

    def empty_cache(self) -> None:
        """Release segments that are free as a whole."""
        for pool in self._pools.values():
            for _, _, block in list(pool.blocks):
                if block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def reset_peak(self) -> None:
        """Start the peaks anew from what is held now."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def _reserve(self, wanted: int, pool: tuple[int, bool]) -> _Block:
        if wanted <= _SMALL:
            size = _SMALL_SEGMENT
        elif wanted < _MIN_LARGE:
            size = _LARGE_SEGMENT
        else:
            size = -(-wanted // _ROUND_LARGE) * _ROUND_LARGE
        self._segments += 1
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return _Block(size, self._segments, pool)

    def _split(self, block: _Block, wanted: int) -> None:
        rest = block.size - wanted
        if rest < _BLOCK or not (block.pool[1] or rest > _SMALL):
            return
        tail = _Block(rest, block.segment, block.pool, before=block, after=block.after, uses=dict(block.uses))
        if block.after is not None:
            block.after.before = tail
        block.after, block.size = tail, wanted
        self._pools[block.pool].add(tail)

    @staticmethod
    def _merge(first: _Block, second: _Block) -> _Block:
        first.size += second.size
        for stream, tick in second.uses.items():
            first.uses[stream] = max(tick, first.uses.get(stream, 0))
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first
