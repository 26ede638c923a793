"""Checksums of tensors at memory speed, computed on the tensor's device."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

#: Widths of the two tables in which the words of a block are summed by column. They are primes, so that no two words
#: of a block share a column in both tables. A block has 0.5 MiB, so it is in the cache for the second sum.
_WIDTHS = (251, 257)
_BLOCK = 251 * 257


def tensor_checksum(tensor: Tensor) -> str:
    """Return a checksum of a tensor's dtype, shape and bytes as eight hexadecimal digits.

    The 64-bit words of each block are summed by column in two tables whose widths are primes, and the sums are hashed
    with CRC-32. Changing or exchanging one or two words changes a sum. Only the sums, less than a hundredth of the
    bytes, leave the device. The checksum detects corrupted transfers; it does not protect against forgery.

    Args:
        tensor: A tensor of any dtype and shape; copied if not contiguous.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if not _is_aligned(flat):
        flat = flat.clone()
    words = _words(flat)
    # Sum block by block on the CPU to stay in its cache, and all blocks at once on a device to save kernel launches.
    tables = _sum_blocks(words, at_once=words.device.type != "cpu")
    return _digest(tensor, tables, flat[words.numel() * 8 :])


def copy_with_checksum(target: Tensor, source: Tensor) -> str:
    """Copy a tensor and return :func:`tensor_checksum` of the copy, summing each block while it is in the cache.

    Args:
        target: A contiguous tensor of the same shape; its dtype may differ.
        source: The tensor to copy. If it has the dtype of ``target``, its own bytes are summed, so that the checksum
            also covers the copying.
    """
    source = source.detach()
    summed = target if source.dtype != target.dtype else source
    on_cpu = target.device.type == source.device.type == "cpu"
    if not on_cpu or not source.is_contiguous() or not _is_aligned(summed) or target.element_size() > 8:
        target.copy_(source)
        return tensor_checksum(summed)
    into, read, flat = target.view(-1), source.view(-1), summed.view(-1).view(torch.uint8)
    words = _words(flat)
    tables = _new_tables(words)
    step = _BLOCK * 8 // target.element_size()
    for number, start in enumerate(range(0, into.numel(), step)):
        if summed is source:
            _sum_block(words, tables, number)
        into[start : start + step].copy_(read[start : start + step])
        if summed is target:
            _sum_block(words, tables, number)
    return _digest(target, tables, flat[words.numel() * 8 :])


def _is_aligned(flat: Tensor) -> bool:
    return flat.data_ptr() % 8 == 0 and flat.storage_offset() * flat.element_size() % 8 == 0


def _words(flat: Tensor) -> Tensor:
    return flat[: flat.numel() // 8 * 8].view(torch.int64)


def _new_tables(words: Tensor) -> list[Tensor]:
    """Allocate the tables of column sums, int64 ``[blocks, width]`` for each width."""
    return [words.new_empty(-(-words.numel() // _BLOCK), width) for width in _WIDTHS]


def _sum_blocks(words: Tensor, at_once: bool) -> list[Tensor]:
    """Return the sums of each block's columns; int64 wraps around."""
    tables = _new_tables(words)
    full = words.numel() // _BLOCK if at_once else 0
    if full:
        for table, width in zip(tables, _WIDTHS, strict=True):
            torch.sum(words[: full * _BLOCK].view(full, -1, width), 1, out=table[:full])
    for number in range(full, len(tables[0])):
        _sum_block(words, tables, number)
    return tables


def _sum_block(words: Tensor, tables: list[Tensor], number: int) -> None:
    block = words[number * _BLOCK : (number + 1) * _BLOCK]
    length = block.numel()
    if not length:
        return
    for table, width in zip(tables, _WIDTHS, strict=True):
        sums, rest = table[number], length % width
        if rest:
            torch.sum(block[: length - rest].view(-1, width), 0, out=sums)
            sums[:rest] += block[length - rest :]
        else:
            torch.sum(block.view(-1, width), 0, out=sums)


def _digest(tensor: Tensor, tables: list[Tensor], tail: Tensor) -> str:
    digest = zlib.crc32(f"{tensor.dtype}|{tuple(tensor.shape)}".encode())
    parts = [part.reshape(-1).view(torch.uint8) for part in (*tables, tail)]
    if tensor.device.type != "cpu":
        parts = [torch.cat(parts).cpu()]  # in one copy, for which the host waits
    for part in parts:
        digest = zlib.crc32(part.numpy().data, digest)
    return f"{digest:08x}"


def combine_checksums(checksums: Iterable[tuple[str, str]]) -> str:
    """Combine named checksums, in order, into one."""
    digest = 0
    for name, checksum in checksums:
        digest = zlib.crc32(f"{name}={checksum};".encode(), digest)
    return f"{digest:08x}"
