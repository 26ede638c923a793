"""One asynchronous call for a whole batch, awaited by each of its samples."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Generator, Sequence
from typing import Any

__all__ = ["SharedCall"]


class SharedCall:
    """A coroutine that returns one value per sample; it starts when the first sample is awaited.

    A plain coroutine for each sample would warn where nobody awaits it, for example after a timeout.

    Args:
        coroutine: returns the values, in order.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Sequence[Any]]) -> None:
        self._coroutine = coroutine
        self._task: asyncio.Task[Sequence[Any]] | None = None

    def __del__(self) -> None:
        if self._task is None:
            self._coroutine.close()

    def parts(self, count: int) -> list[Awaitable[Any]]:
        """Return an awaitable for each of ``count`` values."""
        return [_Part(self, index) for index in range(count)]

    async def value(self, index: int) -> Any:
        """Return one value; exceptions of the coroutine pass through."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._coroutine)
        return (await self._task)[index]


class _Part(Awaitable[Any]):
    def __init__(self, call: SharedCall, index: int) -> None:
        self._call, self._index = call, index

    def __await__(self) -> Generator[Any, None, Any]:
        return self._call.value(self._index).__await__()
