"""Checksums of tensors at memory speed, on the device where they are."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["combine_checksums", "tensor_checksum"]

#: Words a row. A prime, so that exchanged rows of a weight matrix change the sums.
_WIDTH = 509


def tensor_checksum(tensor: Tensor) -> str:
    """Eight hexadecimal digits over a tensor's dtype, shape and bytes.

    The 64-bit words are summed by their position modulo a prime, and the sums hashed with CRC-32: one
    pass over the memory, and only the sums leave the device. It tells transfers that went wrong, and
    is no protection against a forger.

    Args:
        tensor: of any dtype and shape; made contiguous where it is not.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.data_ptr() % 8 or flat.storage_offset() % 8:
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    words = flat[:whole].view(torch.int64)
    rows = words.numel() // _WIDTH
    sums = words[: rows * _WIDTH].view(rows, _WIDTH).sum(0)
    rest = words[rows * _WIDTH :]
    sums[: rest.numel()] += rest
    digest = zlib.crc32(f"{tensor.dtype}|{tuple(tensor.shape)}|{rows}".encode())
    for part in (sums.view(torch.uint8), flat[whole:]):
        digest = zlib.crc32(part.cpu().numpy().data, digest)
    return f"{digest:08x}"


def combine_checksums(checksums: Iterable[tuple[str, str]]) -> str:
    """One checksum over named ones, in their order."""
    digest = 0
    for name, checksum in checksums:
        digest = zlib.crc32(f"{name}={checksum};".encode(), digest)
    return f"{digest:08x}"
