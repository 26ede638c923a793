"""The server manager: which replica answers which request, and what happens when one dies."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rollcast.contracts.rollout import RolloutOutput, RolloutRequest
from rollcast.errors import RollcastError, RolloutError
from rollcast_serving.client import SILENCE_S, ReplicaClient, ReplicaGoneError
from rollcast_serving.launcher import ReplicaAddress

__all__ = ["Revive", "RoutingSettings", "ServerManager"]

logger = logging.getLogger(__name__)
#: Starts the replica with a number again, with the current weights; returns its new address.
Revive = Callable[[int], Awaitable[ReplicaAddress]]
#: Ends the process of the replica with a number.
End = Callable[[int], Awaitable[None]]
T = TypeVar("T")
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class RoutingSettings:
    """Limits of routing and recovery.

    Attributes:
        silence_s: longest time without an output or a heartbeat of a replica, in seconds.
        max_restarts: relaunches of one replica, failed ones included.
        max_attempts: replicas that may die of one request before it is given up.
        max_sessions: sessions that are remembered, the last used.
        chunk: largest number of requests sent to a replica at once; None for an even share.
        streams: chunks in flight on one replica.
    """

    silence_s: float = SILENCE_S
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
    """A router of requests to the replica with the fewest in flight; used from one event loop.

    Args:
        addresses: addresses of the replicas.
        settings: limits of routing and recovery.
        revive: called for a replica that died, again after a failed relaunch; None to go on without it.
        end: called for a replica that is given up, so that it frees its devices.
    """

    def __init__(
        self,
        addresses: Sequence[ReplicaAddress],
        settings: RoutingSettings | None = None,
        revive: Revive | None = None,
        end: End | None = None,
    ) -> None:
        self.settings = settings or RoutingSettings()
        self._revive, self._end = revive, end
        self._replicas = [_Replica(address, self._client(address)) for address in addresses]
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._changed = asyncio.Condition()
        self._reviving: set[asyncio.Task[None]] = set()
        self._retired: list[ReplicaClient] = []

    def _client(self, address: ReplicaAddress) -> ReplicaClient:
        return ReplicaClient(address, self.settings.silence_s)

    @property
    def addresses(self) -> list[ReplicaAddress]:
        """Addresses of the replicas that are not given up."""
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
                self.require_any()
                await self._changed.wait()

    def require_any(self) -> None:
        """Raise RolloutError if every replica is given up."""
        if all(replica.state == "lost" for replica in self._replicas):
            raise RolloutError(
                f"all {len(self._replicas)} replicas are lost; each was started again up to "
                f"rollout.replica.max_restarts={self.settings.max_restarts} times, see their logs"
            )

    # -- many requests ------------------------------------------------------------------------

    async def generate_many(
        self, requests: Sequence[RolloutRequest], progress: Progress | None = None
    ) -> list[RolloutOutput | RollcastError]:
        """Return an output or an error for each request, in the requests' order.

        The longest prompts go first. Each replica takes the next chunk when it has answered one, so that
        a slow one does not keep the others waiting at the end. What a replica that dies has not answered
        is taken by the others.

        Args:
            requests: to answer.
            progress: called with how many are answered, and of how many.

        Raises:
            RolloutError: no replica is left.
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
            self.require_any()
        return [job.answers[index] for index in range(len(requests))]

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

    async def lose(self, deaths: Mapping[int, RollcastError]) -> None:
        """Take replicas out of the routing that another caller found dead, and have them started again.

        Args:
            deaths: by the replica's number, its error.
        """
        for replica in self._replicas:
            if replica.address.index in deaths:
                await self._lose(replica, deaths[replica.address.index])

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
        self._start(self._bring_back(replica) if can else self._give_up(replica))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._reviving.add(task)
        task.add_done_callback(self._reviving.discard)

    async def _bring_back(self, replica: _Replica) -> None:
        state, index = "lost", replica.address.index
        try:
            while state == "lost" and self._revive is not None and replica.restarts < self.settings.max_restarts:
                replica.restarts += 1
                try:
                    address = await self._revive(index)
                except RollcastError as error:
                    logger.warning("restart %d of replica %d failed: %s", replica.restarts, index, error)
                    continue
                replica.address, replica.client, state = address, self._client(address), "up"
                logger.warning("replica %d is back", index)
        finally:
            async with self._changed:
                replica.state = state
                self._changed.notify_all()
        if state == "lost":
            logger.error("replica %d is given up after %d restarts", index, replica.restarts)
            await self._give_up(replica)

    async def _give_up(self, replica: _Replica) -> None:
        if self._end is None:
            return
        try:
            await self._end(replica.address.index)
        except RollcastError as error:
            logger.warning("replica %d could not be ended: %s", replica.address.index, error)

    # -- all of them --------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Ask every replica for its engine's health; dead ones are started again, and waited for.

        Raises:
            RolloutError: none is left.
        """
        await self._ask_each(lambda client: client.call("health"))
        self.require_any()

    async def settle(self) -> None:
        """Wait until no replica is being started."""
        while self._reviving:
            await asyncio.gather(*self._reviving)

    async def generate_on_each(self, request: RolloutRequest) -> list[RolloutOutput]:
        """Return an output of every replica, in their order.

        Raises:
            RollcastError: first error that a replica answered with.
        """

        async def one(client: ReplicaClient) -> RolloutOutput:
            async for _, output in client.generate([request]):
                if isinstance(output, RollcastError):
                    raise output
                return output
            raise ReplicaGoneError(f"{client.where} gave no answer")

        return await self._ask_each(one)

    async def call_all(self, path: str, body: dict[str, Any]) -> None:
        """POST to every replica.

        Raises:
            RollcastError: first error that a replica answered with.
        """
        await self._ask_each(lambda client: client.call(path, body))

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End requests of this manager's callers (None for all) on whichever replica they are."""
        up = [replica.client for replica in self._replicas if replica.state == "up"]
        answers = await asyncio.gather(*(client.abort(request_ids) for client in up), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, ReplicaGoneError):
                raise answer

    async def _ask_each(self, ask: Callable[[ReplicaClient], Awaitable[T]]) -> list[T]:
        """Return every replica's answer; a replica that dies of it is started again and asked again.

        Raises:
            RollcastError: first error that a replica answered with.
        """
        answers: dict[int, T] = {}

        async def one(place: int, replica: _Replica) -> None:
            try:
                answers[place] = await ask(replica.client)
            except ReplicaGoneError as error:
                await self._lose(replica, error)

        await self.settle()
        while waiting := [
            (place, replica)
            for place, replica in enumerate(self._replicas)
            if replica.state == "up" and place not in answers
        ]:
            await asyncio.gather(*(one(place, replica) for place, replica in waiting))
            await self.settle()
        return [answers[place] for place, replica in enumerate(self._replicas) if replica.state == "up"]

    async def close(self) -> None:
        """Close the connections; the replicas go on."""
        for task in self._reviving:
            task.cancel()
        for client in (*self._retired, *(replica.client for replica in self._replicas)):
            await client.close()
