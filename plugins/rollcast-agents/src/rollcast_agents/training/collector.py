"""Batching the turns of many rollouts, for a rollout engine that computes in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rollcast.contracts.rollout import RolloutOutput, RolloutRequest

__all__ = ["TurnCollector"]


class TurnCollector:
    """A collector that holds requests until every rollout in flight waits for one.

    A batch then has the same rows in the same order in every run with the same seed, provided that tools and
    environments answer in time. A slower rollout is awaited for ``wait_s``, and its turn then joins a later batch.

    Args:
        generate: the engine's method; requests that it receives together are computed together.
        wait_s: maximum seconds to wait, counted from the first waiting request.
    """

    def __init__(self, generate: Callable[[RolloutRequest], Awaitable[RolloutOutput]], wait_s: float) -> None:
        self._generate = generate
        self._wait_s = wait_s
        self._under_way = 0
        self._gates: dict[asyncio.Future[None], int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def enter(self) -> None:
        """Count a rollout that is about to start."""
        self._under_way += 1

    def leave(self) -> None:
        """Count a rollout that has ended, so that others do not wait for it."""
        self._under_way -= 1
        self._check()

    async def generate(self, number: int, request: RolloutRequest) -> RolloutOutput:
        """Return the engine's output for a request.

        Args:
            number: number of the session, which orders the requests of a batch.
            request: request of the session's next turn.
        """
        gate = asyncio.get_running_loop().create_future()
        self._gates[gate] = number
        self._check()
        try:
            await gate
        finally:
            self._gates.pop(gate, None)
        return await self._generate(request)

    def _check(self) -> None:
        if not self._gates:
            self._stop_timer()
        elif len(set(self._gates.values())) >= self._under_way:
            self._open()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._wait_s, self._open)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _open(self) -> None:
        """Release all waiting requests in the order of their sessions."""
        self._stop_timer()
        gates, self._gates = self._gates, {}
        for gate in sorted(gates, key=gates.__getitem__):
            if not gate.done():
                gate.set_result(None)
