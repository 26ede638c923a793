"""The server manager: which replica answers which request, and what happens when one dies."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollcast.contracts.rollout import RolloutOutput, RolloutRequest
from rollcast.errors import RollcastError, RolloutError
from rollcast_serving.client import ReplicaClient, ReplicaGoneError
from rollcast_serving.launcher import ReplicaAddress

__all__ = ["Revive", "RoutingSettings", "ServerManager"]

logger = logging.getLogger(__name__)
#: Starts the replicas with these numbers again, with the present weights; their new addresses.
Revive = Callable[[Sequence[int]], Awaitable[Sequence[ReplicaAddress]]]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class RoutingSettings:
    """How requests are spread.

    Attributes:
        request_timeout_s: how long a replica may be silent while it has requests.
        max_restarts: how often one replica is started again.
        max_attempts: replicas that may die of one request before it is given up.
        max_sessions: sessions that are remembered, the last used.
        chunk: most requests that are sent to a replica at once; None for an even share.
        streams: chunks that are under way on one replica.
    """

    request_timeout_s: float = 1800.0
    max_restarts: int = 3
    max_attempts: int = 3
    max_sessions: int = 8192
    chunk: int | None = 64
    streams: int = 4


@dataclass
class _Replica:
    address: ReplicaAddress
    client: ReplicaClient
    state: str = "up"  # or reviving, or lost
    in_flight: int = 0
    restarts: int = 0


@dataclass
class _Job:
    """A batch of requests on its way: what nobody has taken yet, and what has come back."""

    requests: Sequence[RolloutRequest]
    waiting: deque[int]
    chunk: int
    progress: Progress | None
    answers: dict[int, RolloutOutput | RollcastError] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        return len(self.answers) == len(self.requests)

    def answer(self, index: int, output: RolloutOutput | RollcastError) -> None:
        self.answers[index] = output
        if self.progress is not None:
            self.progress(len(self.answers), len(self.requests))


class ServerManager:
    """Routes requests to the replica with the fewest in flight; used from one event loop.

    Args:
        addresses: of the replicas.
        settings: how.
        revive: called for a replica that died; None to go on without it.
    """

    def __init__(
        self,
        addresses: Sequence[ReplicaAddress],
        settings: RoutingSettings | None = None,
        revive: Revive | None = None,
    ) -> None:
        self.settings = settings or RoutingSettings()
        self._revive = revive
        self._replicas = [_Replica(address, self._client(address)) for address in addresses]
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._changed = asyncio.Condition()
        self._reviving: set[asyncio.Task[None]] = set()
        self._retired: list[ReplicaClient] = []

    def _client(self, address: ReplicaAddress) -> ReplicaClient:
        return ReplicaClient(address, self.settings.request_timeout_s)

    @property
    def addresses(self) -> list[ReplicaAddress]:
        """Of the replicas that are not given up."""
        return [replica.address for replica in self._replicas if replica.state != "lost"]

    @property
    def in_flight(self) -> list[int]:
        """Requests under way, by replica."""
        return [replica.in_flight for replica in self._replicas]

    # -- one request --------------------------------------------------------------------------

    async def generate(self, request: RolloutRequest, session_id: str | None = None) -> RolloutOutput:
        """One request; those of one session go to the same replica as long as it lives, for its cached prefix.

        Raises:
            RequestError: it cannot be served.
            RolloutError: no replica is left, or too many died of it.
        """
        for _ in range(self.settings.max_attempts):
            replica = await self._pick(session_id)
            replica.in_flight += 1
            try:
                async for _, output in replica.client.generate([request]):
                    if isinstance(output, RollcastError):
                        raise output
                    return output
            except ReplicaGoneError as error:
                await self._lose(replica, error)
            finally:
                replica.in_flight -= 1
        raise self._given_up(request)

    async def _pick(self, session_id: str | None) -> _Replica:
        known = None if session_id is None else self._sessions.get(session_id)
        replica = self._replicas[known] if known is not None else None
        if replica is None or replica.state != "up":
            replica = await self._least_busy()
        if session_id is not None:
            self._sessions[session_id] = self._replicas.index(replica)
            self._sessions.move_to_end(session_id)
            while len(self._sessions) > self.settings.max_sessions:
                self._sessions.popitem(last=False)
        return replica

    async def _least_busy(self) -> _Replica:
        async with self._changed:
            while True:
                up = [replica for replica in self._replicas if replica.state == "up"]
                if up:
                    return min(up, key=lambda replica: replica.in_flight)
                self._require_any()
                await self._changed.wait()

    def _require_any(self) -> None:
        if all(replica.state == "lost" for replica in self._replicas):
            raise RolloutError(
                f"all {len(self._replicas)} replicas are lost; each was started again up to "
                f"rollout.replica.max_restarts={self.settings.max_restarts} times, see their logs"
            )

    # -- many requests ------------------------------------------------------------------------

    async def generate_many(
        self, requests: Sequence[RolloutRequest], progress: Progress | None = None
    ) -> list[RolloutOutput]:
        """All requests, over all replicas; outputs in the requests' order.

        The longest prompts go first. Each replica takes the next chunk when it has answered one, so that
        a slow one does not keep the others waiting at the end. What a replica that dies has not answered
        is taken by the others.

        Args:
            requests: to answer.
            progress: called with how many are answered, and of how many.

        Raises:
            RequestError: a request cannot be served; the first in their order.
            RolloutError: no replica is left, or too many died of one request.
        """
        if not requests:
            return []
        order = sorted(range(len(requests)), key=lambda index: -len(requests[index].prompt_ids))
        share = -(-len(requests) // (len(self._replicas) * self.settings.streams))
        chunk = share if self.settings.chunk is None else min(share, self.settings.chunk)
        job = _Job(requests, deque(order), max(chunk, 1), progress)
        takers = [
            asyncio.ensure_future(self._take(replica, job))
            for replica in self._replicas
            for _ in range(self.settings.streams)
        ]
        try:
            await asyncio.gather(*takers)
        finally:
            for taker in takers:
                taker.cancel()
        if not job.is_done:
            self._require_any()
        outputs = [job.answers[index] for index in range(len(requests))]
        for output in outputs:
            if isinstance(output, RollcastError):
                raise output
        return [output for output in outputs if isinstance(output, RolloutOutput)]

    async def _take(self, replica: _Replica, job: _Job) -> None:
        """Send a replica one chunk after the other, until all requests of the job are answered."""
        while True:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: job.is_done or replica.state == "lost" or (replica.state == "up" and bool(job.waiting))
                )
                if job.is_done or replica.state == "lost":
                    return
                taken = [job.waiting.popleft() for _ in range(min(job.chunk, len(job.waiting)))]
            await self._send(replica, job, taken)
            async with self._changed:
                self._changed.notify_all()

    async def _send(self, replica: _Replica, job: _Job, taken: Sequence[int]) -> None:
        left = dict.fromkeys(taken)
        replica.in_flight += len(taken)
        try:
            async for place, output in replica.client.generate([job.requests[index] for index in taken]):
                job.answer(taken[place], output)
                replica.in_flight -= 1
                del left[taken[place]]
        except ReplicaGoneError as error:
            for index in left:
                job.attempts[index] = job.attempts.get(index, 0) + 1
                if job.attempts[index] >= self.settings.max_attempts:
                    job.answer(index, self._given_up(job.requests[index]))
                else:
                    job.waiting.appendleft(index)
            await self._lose(replica, error)
        finally:
            replica.in_flight -= len(left)

    def _given_up(self, request: RolloutRequest) -> RolloutError:
        return RolloutError(
            f"request {request.request_id!r} is given up: {self.settings.max_attempts} replicas died while they had it"
        )

    # -- replicas that die --------------------------------------------------------------------

    async def _lose(self, replica: _Replica, error: RollcastError) -> None:
        """Take a replica out of the routing, and have it started again."""
        async with self._changed:
            if replica.state != "up":  # another of its requests was first
                return
            can = self._revive is not None and replica.restarts < self.settings.max_restarts
            replica.state = "reviving" if can else "lost"
            self._changed.notify_all()
        logger.warning("%s; %s", error, "it is started again" if can else "it is given up")
        # Its connections are left to break with the process: other requests may be reading from them.
        self._retired.append(replica.client)
        if can:
            task = asyncio.ensure_future(self._bring_back(replica))
            self._reviving.add(task)
            task.add_done_callback(self._reviving.discard)

    async def _bring_back(self, replica: _Replica) -> None:
        replica.restarts += 1
        state = "lost"
        try:
            if self._revive is not None:
                (address,) = await self._revive([replica.address.index])
                replica.address, replica.client = address, self._client(address)
                state = "up"
                logger.warning("replica %d is back", address.index)
        except RollcastError as error:
            logger.error("replica %d cannot be started again: %s", replica.address.index, error)  # whole
        finally:
            async with self._changed:
                replica.state = state
                self._changed.notify_all()

    # -- all of them --------------------------------------------------------------------------

    async def check_health(self, timeout_s: float = 30.0) -> None:
        """Ask every replica; those that do not answer are started again, and waited for.

        Raises:
            RolloutError: none is left.
        """

        async def check(replica: _Replica) -> None:
            try:
                await replica.client.call("health", timeout_s=timeout_s)
            except RollcastError as error:
                await self._lose(replica, error)

        await asyncio.gather(*(check(replica) for replica in self._replicas if replica.state == "up"))
        await self.settle()
        self._require_any()

    async def settle(self) -> None:
        """Wait until no replica is being started."""
        while self._reviving:
            await asyncio.gather(*self._reviving)

    async def generate_on_each(self, request: RolloutRequest) -> list[RolloutOutput]:
        """One request on every replica that is up, in their order.

        Raises:
            RollcastError: of the first that answered with one.
        """

        async def one(replica: _Replica) -> RolloutOutput:
            async for _, output in replica.client.generate([request]):
                if isinstance(output, RollcastError):
                    raise output
                return output
            raise RolloutError(f"{replica.client.where} gave no answer")

        return list(await asyncio.gather(*(one(replica) for replica in self._replicas if replica.state == "up")))

    async def call_all(self, path: str, body: dict[str, Any]) -> None:
        """POST to every replica that is up.

        Raises:
            RollcastError: of the first that answered with one.
        """
        up = [replica for replica in self._replicas if replica.state == "up"]
        await asyncio.gather(*(replica.client.call(path, body) for replica in up))

    async def close(self) -> None:
        """Close the connections; the replicas go on."""
        for task in self._reviving:
            task.cancel()
        for client in (*self._retired, *(replica.client for replica in self._replicas)):
            await client.close()
