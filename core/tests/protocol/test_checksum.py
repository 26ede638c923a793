"""Checksums of tensors: what they see, and what they do not depend on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollcast.protocol import combine_checksums, copy_with_checksum, tensor_checksum
from rollcast.protocol._checksum import _BLOCK, _WIDTHS, _sum_blocks

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool]
PAIRS = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    *((same, same) for same in (torch.bfloat16, torch.float64, torch.uint8, torch.complex128)),
]


def filled(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype == torch.bool else 100, (numel,), generator=generator).to(dtype)


@given(
    numel=st.integers(1, 20_000),
    dtype=st.sampled_from(DTYPES),
    place=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
)
def test_a_flipped_bit_is_seen(numel: int, dtype: torch.dtype, place: float, bit: int) -> None:
    tensor = filled(numel, dtype)
    changed = tensor.clone()
    raw = changed.view(torch.uint8)
    raw[int(place * raw.numel())] ^= 1 << bit
    assert tensor_checksum(changed) != tensor_checksum(tensor)
    assert tensor_checksum(tensor.clone()) == tensor_checksum(tensor)


@pytest.mark.parametrize("width", [64, 512, 1024, 4096])
def test_exchanged_rows_are_seen(width: int) -> None:
    tensor = torch.randn(8, width)
    assert tensor_checksum(tensor[[1, 0, 2, 3, 4, 5, 6, 7]]) != tensor_checksum(tensor)


@pytest.mark.parametrize("width", [1, 2, 64, 509, 1018])
@pytest.mark.parametrize("other", [1, 508, 509, 510, 1018, 521 * 2])
def test_far_rows_exchanged_are_seen(width: int, other: int) -> None:
    tensor = torch.randn(1043, width, generator=torch.Generator().manual_seed(width))
    order = torch.arange(len(tensor))
    order[0], order[other] = other, 0
    assert tensor_checksum(tensor[order]) != tensor_checksum(tensor)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float32])
@pytest.mark.parametrize("other", [1, 509, 1018])
@pytest.mark.parametrize("pair", [(1.0, 2.0), (-3.0, 3.0), (0.0, 1.0)])
def test_exchanged_rows_with_equal_sums_are_seen(dtype: torch.dtype, other: int, pair: tuple[float, float]) -> None:
    tensor = torch.tensor(pair, dtype=dtype).repeat_interleave(2).repeat(1100, 1)
    tensor[other] = tensor[other].flip(0)
    changed = tensor.clone()
    changed[[0, other]] = tensor[[other, 0]]
    assert tensor_checksum(changed) != tensor_checksum(tensor)


@given(
    places=st.tuples(st.integers(0, 3 * _BLOCK - 1), st.integers(0, 3 * _BLOCK - 1)),
    factor=st.sampled_from([0, 1, _WIDTHS[0], _WIDTHS[1], _BLOCK]),
    word=st.integers(0, 7),
    bit=st.integers(0, 63),
)
def test_two_words_exchanged_are_seen_anywhere(places: tuple[int, int], factor: int, word: int, bit: int) -> None:
    """Also words that differ in one bit only, such as a sign, and at the distances of the tables' widths and blocks."""
    tensor = torch.zeros(3 * _BLOCK + 17, dtype=torch.int64)
    first, second = places[0], places[0] + word * factor if factor else places[1]
    tensor[first] = 1 << bit if bit < 63 else -(1 << 63)
    changed = tensor.clone()
    changed[first], changed[second % len(tensor)] = tensor[second % len(tensor)], tensor[first]
    assert (tensor_checksum(changed) != tensor_checksum(tensor)) == (not torch.equal(changed, tensor))


@pytest.mark.parametrize("numel", [0, 1, 250, _BLOCK - 1, _BLOCK, _BLOCK + 1, 2 * _BLOCK, 3 * _BLOCK + 300])
def test_a_device_sums_as_the_cpu_does(numel: int) -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (numel,), generator=torch.Generator().manual_seed(numel))
    for one, other in zip(_sum_blocks(words, at_once=False), _sum_blocks(words, at_once=True), strict=True):
        assert torch.equal(one, other)


@given(
    shape=st.sampled_from([(), (0, 3), (7,), (3, 5), (300, 251), (257, 500), (130_000,), (64, 2017)]),
    dtypes=st.sampled_from(PAIRS),
    offset=st.integers(0, 3),
    is_strided=st.booleans(),
)
def test_a_copy_with_checksum_is_both(
    shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype], offset: int, is_strided: bool
) -> None:
    numel = torch.Size(shape).numel()
    source = (torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 9).to(dtypes[0]).view(shape)
    if is_strided and source.dim() == 2:
        source = source.T.contiguous().T
    target = torch.empty(numel + offset, dtype=dtypes[1])[offset:].view(shape)
    checksum = copy_with_checksum(target, source)
    assert torch.equal(target, source.to(dtypes[1]))
    assert checksum == tensor_checksum(target)


def test_name_dtype_and_shape_count() -> None:
    tensor = torch.zeros(6)
    variants = [tensor, tensor.view(2, 3), tensor.view(3, 2), tensor.to(torch.int32), torch.zeros(7), torch.zeros(())]
    assert len({tensor_checksum(each) for each in variants}) == len(variants)
    named = [[("a", "1"), ("b", "2")], [("b", "2"), ("a", "1")], [("a", "1")], [("a", "12")], []]
    assert len({combine_checksums(each) for each in named}) == len(named)


def test_layout_does_not_count() -> None:
    tensor = torch.randn(64, 48)
    assert tensor_checksum(tensor.T) == tensor_checksum(tensor.T.contiguous())
    shifted = torch.zeros(3073)[1:].view(64, 48).copy_(tensor)
    assert tensor_checksum(shifted) == tensor_checksum(tensor)
    assert tensor_checksum(tensor.requires_grad_()) == tensor_checksum(tensor.detach())
    assert len(tensor_checksum(torch.empty(0))) == 8
