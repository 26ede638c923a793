"""Checksums of tensors at memory speed, on the device where they are."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

#: Columns of the two tables in which the words of a block are written to be summed: primes, so that no two words of a
#: block share a column in both. The block, 0.5 MiB, is in the cache when it is summed for the second time.
_WIDTHS = (251, 257)
_BLOCK = 251 * 257


def tensor_checksum(tensor: Tensor) -> str:
    """Return eight hexadecimal digits over a tensor's dtype, shape and bytes.

    The 64-bit words of each block are summed by column of two tables, whose widths are primes, and the sums are hashed
    with CRC-32. One or two words that changed, or were exchanged, change a sum. Only the sums, less than a hundredth of
    the bytes, leave the device. The checksum detects damaged transfers; it is no protection against a forger.

    Args:
        tensor: A tensor of any dtype and shape; copied if it is not contiguous.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.data_ptr() % 8 or flat.storage_offset() % 8:
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    # A block at a time on the CPU, for its cache; all at once on a device, where each launch counts.
    sums = _sum_blocks(flat[:whole].view(torch.int64), at_once=flat.device.type != "cpu")
    digest = zlib.crc32(f"{tensor.dtype}|{tuple(tensor.shape)}".encode())
    for part in (*sums, flat[whole:]):
        digest = zlib.crc32(part.reshape(-1).view(torch.uint8).cpu().numpy().data, digest)
    return f"{digest:08x}"


def _sum_blocks(words: Tensor, at_once: bool) -> list[Tensor]:
    """Return the sums of each block's columns, int64 ``[blocks, width]`` for each width; int64 wraps around."""
    full = words.numel() // _BLOCK if at_once else 0
    tables = [words.new_empty(-(-words.numel() // _BLOCK), width) for width in _WIDTHS]
    if full:
        for table, width in zip(tables, _WIDTHS, strict=True):
            torch.sum(words[: full * _BLOCK].view(full, -1, width), 1, out=table[:full])
    for number in range(full, len(tables[0])):
        block = words[number * _BLOCK : (number + 1) * _BLOCK]
        for table, width in zip(tables, _WIDTHS, strict=True):
            lines = block.numel() // width
            torch.sum(block[: lines * width].view(lines, width), 0, out=table[number])
            rest = block[lines * width :]
            table[number, : rest.numel()] += rest
    return tables


def combine_checksums(checksums: Iterable[tuple[str, str]]) -> str:
    """Return one checksum over named ones, in their order."""
    digest = 0
    for name, checksum in checksums:
        digest = zlib.crc32(f"{name}={checksum};".encode(), digest)
    return f"{digest:08x}"
