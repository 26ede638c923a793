"""The model of torch's caching allocator."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollcast_dryrun.memory import CachingAllocator

KIB, MIB = 1 << 10, 1 << 20


def test_segments_are_those_of_torch() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1, 0)
    assert (allocator.allocated, allocator.reserved) == (512, 2 * MIB)
    allocator.allocate(2 * MIB, 0)
    assert allocator.reserved == 22 * MIB
    allocator.allocate(18 * MIB, 0)
    assert (allocator.allocated, allocator.reserved) == (512 + 20 * MIB, 22 * MIB)
    allocator.allocate(11 * MIB + 1, 0)
    assert allocator.reserved == 34 * MIB


def test_streams_do_not_share_memory() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB, 0), {})
    allocator.allocate(30 * MIB, 1)
    assert allocator.reserved == 60 * MIB
    allocator.allocate(30 * MIB, 0)
    assert allocator.reserved == 60 * MIB


def test_neighbours_merge_and_whole_segments_are_released() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB, 0) for _ in range(4)]
    assert allocator.reserved == 20 * MIB
    for block in (blocks[1], blocks[3], blocks[2]):
        allocator.free(block, {})
    allocator.empty_cache()
    assert allocator.reserved == 20 * MIB
    allocator.allocate(15 * MIB, 0)
    assert allocator.reserved == 20 * MIB
    allocator.free(blocks[0], {})


def test_a_block_remembers_who_used_its_parts() -> None:
    allocator = CachingAllocator()
    first, second = allocator.allocate(9 * MIB, 0), allocator.allocate(9 * MIB, 0)
    allocator.free(first, {1: 7})
    allocator.free(second, {1: 3, 2: 4})
    assert allocator.allocate(18 * MIB, 0).uses == {1: 7, 2: 4}


@given(st.lists(st.tuples(st.integers(1, 64 * MIB), st.integers(0, 2), st.booleans()), max_size=60))
def test_what_is_freed_is_free(requests: list[tuple[int, int, bool]]) -> None:
    allocator = CachingAllocator()
    held = []
    for size, stream, frees in requests:
        held.append((allocator.allocate(size, stream), size))
        if frees:
            allocator.free(held.pop(len(held) // 2)[0], {})
        assert sum(size for _, size in held) <= allocator.allocated <= allocator.reserved
        assert allocator.peak_allocated >= allocator.allocated
    for block, _ in held:
        allocator.free(block, {})
    assert allocator.allocated == 0
    allocator.empty_cache()
    assert allocator.reserved == 0
