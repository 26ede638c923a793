"""Reading the frames of a replica's stream, asynchronously or blocking."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol

import aiohttp

from rollcast_serving.wire import LENGTH, unpack

__all__ = ["read_frames", "read_frames_blocking"]


class _Readable(Protocol):
    def read(self, amount: int, /) -> bytes: ...


async def read_frames(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Yield the messages of a stream.

    Raises:
        EOFError: the stream ends inside a frame.
        ValueError: a frame is not msgpack.
    """
    while head := await content.read(1):
        (length,) = LENGTH.unpack(head + await content.readexactly(LENGTH.size - 1))
        yield unpack(await content.readexactly(length))


def read_frames_blocking(stream: _Readable) -> Iterator[dict[str, Any]]:
    """Yield the messages of a blocking stream; see :func:`read_frames`."""
    while head := stream.read(LENGTH.size):
        if len(head) < LENGTH.size:
            raise EOFError("the stream ended inside a frame")
        (length,) = LENGTH.unpack(head)
        data = stream.read(length)
        if len(data) < length:
            raise EOFError("the stream ended inside a frame")
        yield unpack(data)
