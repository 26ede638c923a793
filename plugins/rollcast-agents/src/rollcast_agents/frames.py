"""Messages between a run and its processes for users' code: pickles, preceded by their length."""

from __future__ import annotations

import asyncio
import pickle
import struct
from typing import Any

__all__ = ["MOST_BYTES", "read_frame", "write_frame"]

_LENGTH = struct.Struct("!Q")
MOST_BYTES = 64 << 20
"""Largest size of a result in bytes."""


def write_frame(writer: asyncio.StreamWriter, frame: tuple[int, str, bytes]) -> None:
    """Write a message: the number of its call, a word, and a pickle that the receiver of the call reads."""
    data = pickle.dumps(frame)
    writer.write(_LENGTH.pack(len(data)) + data)


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, str, bytes] | None:
    """Return the next message; None if the connection is closed."""
    try:
        size = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0]
        frame: Any = pickle.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, OSError):
        return None
    number, word, data = frame
    return int(number), str(word), bytes(data)
