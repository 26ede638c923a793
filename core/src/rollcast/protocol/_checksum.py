"""Checksums of tensors at memory speed, on the device where they are."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

#: Words in a line of the table that is summed.
_WIDTH = 509
#: Lines that are summed at a time: on the CPU so that the second sum finds them in the cache (0.5 MiB), on a device so
#: that the mixed copy stays small (256 MiB).
_BLOCK, _DEVICE_BLOCK = 128, 1 << 16
#: Odd 64-bit constants of the golden ratio and of a linear generator, as int64.
_GOLDEN, _STEP = -7046029254386353131, 6364136223846793005


def tensor_checksum(tensor: Tensor) -> str:
    """Return eight hexadecimal digits over a tensor's dtype, shape and bytes.

    The 64-bit words, written in lines of 509, are summed by line, and by position in the line after mixing each with
    its line's number; the sums are hashed with CRC-32. Words or rows that are exchanged change one or the other,
    also where the rows have equal sums. Only the sums leave the device. The checksum detects damaged transfers; it is
    no protection against a forger.

    Args:
        tensor: A tensor of any dtype and shape; copied if it is not contiguous.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.data_ptr() % 8 or flat.storage_offset() % 8:
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    words = flat[:whole].view(torch.int64)
    rows = words.numel() // _WIDTH
    lines = words[: rows * _WIDTH].view(rows, _WIDTH)
    by_line, by_position = lines.new_empty(rows), lines.new_zeros(_WIDTH)
    step = min(_BLOCK if lines.device.type == "cpu" else _DEVICE_BLOCK, rows)
    factors, room = _factors(rows, lines.device), lines.new_empty(step, _WIDTH)
    for start in range(0, rows, step or 1):
        block = lines[start : start + step]
        torch.sum(block, 1, out=by_line[start : start + step])
        by_position += _mixed(block, factors[start : start + step], room[: len(block)]).sum(0)
    rest = words[rows * _WIDTH :]
    by_position[: rest.numel()] += rest
    digest = zlib.crc32(f"{tensor.dtype}|{tuple(tensor.shape)}|{rows}".encode())
    for part in (by_position.view(torch.uint8), by_line.view(torch.uint8), flat[whole:]):
        digest = zlib.crc32(part.cpu().numpy().data, digest)
    return f"{digest:08x}"


def _factors(rows: int, device: torch.device) -> Tensor:
    """Return an odd factor for each line; int64 wraps around."""
    numbers = torch.arange(1, 1 + rows, device=device)
    return (numbers * _GOLDEN).bitwise_xor_(numbers * _STEP >> 31).bitwise_or_(1)


def _mixed(block: Tensor, factors: Tensor, room: Tensor) -> Tensor:
    """Return the words, each mixed with the factor of its line, in ``room``; int64 wraps around."""
    # Bit 63 alone would survive the product unchanged: two sign bits that are exchanged would cancel out. So it is
    # copied to bit 34 first, by a shift without sign (an arithmetic one would make a word and its complement one).
    torch.bitwise_right_shift(block, 29, out=room)
    return room.bitwise_and_((1 << 35) - 1).bitwise_xor_(block).mul_(factors.unsqueeze(1))


def combine_checksums(checksums: Iterable[tuple[str, str]]) -> str:
    """Return one checksum over named ones, in their order."""
    digest = 0
    for name, checksum in checksums:
        digest = zlib.crc32(f"{name}={checksum};".encode(), digest)
    return f"{digest:08x}"
