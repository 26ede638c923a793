"""Kernels in Triton, which read their source from a file of its own."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def doubled(source, target, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(target + place, 2 * tl.load(source + place, mask=place < count), mask=place < count)


@triton.jit
def of_odd_blocks(source, target, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Blocks of a size that is no power of two are refused by the compiler."""
    place = tl.arange(0, 3)
    tl.store(target + place, tl.load(source + place))
