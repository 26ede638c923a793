"""Counts: checking them, and saying which ones would fit."""

from __future__ import annotations

import torch

from rollcast.errors import DataProtoError


def check_count(what: str, value: int, minimum: int = 1) -> int:
    """``value``, if it is an int of at least ``minimum``; else a ``DataProtoError``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise DataProtoError(f"{what} must be an int of at least {minimum}, not {value!r}")
    return value


def _nearest_divisors(length: int, value: int) -> list[int]:
    divisors = [n for n in range(1, length + 1) if length % n == 0]
    below = [n for n in divisors if n < value][-1:]
    return below + [n for n in divisors if n > value][:1]


def require_divisible(operation: str, length: int, value: int, unit: str) -> None:
    """Raise a ``DataProtoError`` naming sizes that fit unless ``value`` divides ``length``."""
    if length % value == 0:
        return
    below = length // value * value
    lengths = [str(n) for n in (below, below + value) if n]
    raise DataProtoError(
        f"{operation}: {length} rows cannot be cut in {value} {unit}; the nearest that fit are"
        f" {' and '.join(map(str, _nearest_divisors(length, value)))} {unit}, or"
        f" {' and '.join(lengths)} rows (pad_to_divisor({value}) gives {below + value})"
    )


def padding_rows(length: int, divisor: int, mode: str) -> tuple[torch.Tensor, int]:
    """``(index [padded length], pad_size)`` of rows that pad ``length`` to a multiple."""
    pad_size = -length % divisor
    rows = torch.arange(length)
    if mode == "last":
        added = rows[-1:].expand(pad_size) if length else rows
    elif mode == "first":
        added = rows[:1].expand(pad_size) if length else rows
    elif mode == "cycle":
        added = torch.arange(pad_size) % max(length, 1)
    else:
        raise DataProtoError(f"pad: mode is 'last', 'first' or 'cycle', not {mode!r}")
    return torch.cat([rows, added]), pad_size
