"""The server manager: routing of requests to replicas, and recovery when a replica dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rollcast.contracts.rollout import EngineLoad, RolloutOutput, RolloutRequest, SamplingParams
from rollcast.errors import RollcastError, RolloutError
from rollcast_serving.client import SILENCE_S, ReplicaClient
from rollcast_serving.launcher import ReplicaAddress
from rollcast_serving.load_figures import LoadFigures
from rollcast_serving.replica_stream import ReplicaGoneError
from rollcast_serving.requests import as_tokens
from rollcast_serving.scheduling import SlidingWindow

__all__ = ["Progress", "Revive", "RoutingSettings", "ServerManager", "Stragglers"]

logger = logging.getLogger(__name__)
#: Restarts the replica with this number, with the current weights, and returns its new address.
Revive = Callable[[int], Awaitable[ReplicaAddress]]
#: Ends the process of the replica with this number.
End = Callable[[int], Awaitable[None]]
T = TypeVar("T")
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class RoutingSettings:
    """Limits of routing and recovery.

    Attributes:
        silence_s: maximum seconds without an output or a heartbeat of a replica.
        max_restarts: restarts of one replica, failed ones included.
        max_attempts: replicas that may die while they hold a request before it fails.
        max_sessions: number of most recently used sessions that are remembered.
        continuous: True if the engines add requests to a running batch (``capabilities.continuous_batching``).
        section: dotted key of the replicas' section, for messages.
    """

    silence_s: float = SILENCE_S
    max_restarts: int = 3
    max_attempts: int = 3
    max_sessions: int = 8192
    continuous: bool = True
    section: str = "rollout"


@dataclass(frozen=True)
class Stragglers:
    """Policy for ending late requests once most others have ended.

    Attributes:
        share: maximum share of the requests of a batch that may be cut, from 0 to 1.
        grace_s: seconds to wait after the others have ended.
    """

    share: float
    grace_s: float


@dataclass
class _Replica:
    address: ReplicaAddress
    client: ReplicaClient
    state: str = "up"  # "up", "reviving" or "lost"
    restarts: int = 0


@dataclass(eq=False)
class _Job:
    """Requests of one caller, their answers so far, and the tasks that wait for the others."""

    requests: Sequence[RolloutRequest]
    progress: Progress | None = None
    session_id: str | None = None
    answers: dict[int, RolloutOutput | RollcastError] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    sends: set[asyncio.Task[None]] = field(default_factory=set)
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    #: Set by every answer.
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    def answer(self, index: int, output: RolloutOutput | RollcastError) -> None:
        self.answers[index] = output
        self.answered.set()
        if self.progress is not None:
            self.progress(len(self.answers), len(self.requests))
        if len(self.answers) == len(self.requests) and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def sequences(self, indices: Iterable[int]) -> int:
        return sum(max(self.requests[index].sampling.n, 1) for index in indices)

    def groups(self) -> list[_Group]:
        """Return the requests grouped by prompt, longest prompts first."""
        indices_by_prompt: dict[tuple[bytes | int, SamplingParams], list[int]] = {}
        for index, request in enumerate(self.requests):
            indices_by_prompt.setdefault((_prompt_key(request, index), request.sampling), []).append(index)
        groups = [_Group(self, tuple(indices)) for indices in indices_by_prompt.values()]
        return sorted(groups, key=lambda group: -len(self.requests[group.indices[0]].prompt_ids))


@dataclass(frozen=True, eq=False)
class _Group:
    """Requests of a job that are sent to a replica together."""

    job: _Job
    indices: tuple[int, ...]

    @property
    def entry(self) -> tuple[_Group, int]:
        return self, self.job.sequences(self.indices)


def _is_empty_cut(answer: RolloutOutput | RollcastError) -> bool:
    """Return True if a request was cut before a token was sampled."""
    return isinstance(answer, RolloutOutput) and any(
        sequence.finish_reason == "abort" and not len(sequence.token_ids) for sequence in answer.sequences
    )


def _prompt_key(request: RolloutRequest, index: int) -> bytes | int:
    """Return a key that equal prompts share; a unique one if the prompt is not made of token ids."""
    try:
        return as_tokens(request.prompt_ids).tobytes()
    except (TypeError, OverflowError):
        return index


class ServerManager:
    """A router of requests with one shared queue, from which each replica takes the next as soon as it has room.

    A replica has as many sequences in flight as its engine computes at once, or fewer when its cache is short; see
    :mod:`rollcast_serving.scheduling`. Use it from one event loop.

    Args:
        addresses: addresses of the replicas.
        settings: limits of routing and recovery.
        revive: called for a dead replica, again after a failed restart; None to continue without it.
        end: called for a lost replica, so that it frees its devices.
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
        self._window: SlidingWindow[_Group] = SlidingWindow(len(addresses), self.settings.continuous)
        self._pumps = False
        self._cut = 0
        self._jobs: set[_Job] = set()
        self._figures = LoadFigures()
        self._reviving: set[asyncio.Task[None]] = set()
        self._retired: list[ReplicaClient] = []

    def _client(self, address: ReplicaAddress) -> ReplicaClient:
        return ReplicaClient(address, self.settings.silence_s)

    @property
    def addresses(self) -> list[ReplicaAddress]:
        """Addresses of the replicas that are not lost."""
        return [replica.address for replica in self._replicas if replica.state != "lost"]

    @property
    def in_flight(self) -> list[int]:
        """Sequences in flight, by replica."""
        return self._window.in_flight

    def take_metrics(self) -> dict[str, float]:
        """Return metrics of the engines' load since the last call; empty before the first request.

        ``rollout/stragglers`` is the number of responses that were cut; absent if none was.
        """
        cut, self._cut = self._cut, 0
        return self._figures.take(self._window.caps) | ({"rollout/stragglers": float(cut)} if cut else {})

    # -- one request --------------------------------------------------------------------------

    async def generate(self, request: RolloutRequest, session_id: str | None = None) -> RolloutOutput:
        """Return the output of one request; requests of a session go to the same replica while it lives, for its cached
        prefix.

        Raises:
            RequestError: it cannot be served.
            RolloutError: no replica is left, or too many died while they held the request.
        """
        job = _Job([request], session_id=session_id)
        place = None if session_id is None else self._sessions.get(session_id)
        if place is not None and self._replicas[place].state == "up" and self._window.is_open(place):
            (group,) = job.groups()
            self._window.occupy(place, group.entry[1])
            await self._run(job, lambda: self._send_to(place, job, [group]))
        else:
            await self._run(job, lambda: self._submit(job))
        answer = job.answers[0]
        if isinstance(answer, RollcastError):
            raise answer
        return answer

    def _remember(self, session_id: str, place: int) -> None:
        self._sessions[session_id] = place
        self._sessions.move_to_end(session_id)
        while len(self._sessions) > self.settings.max_sessions:
            self._sessions.popitem(last=False)

    def require_any(self) -> None:
        """Raise RolloutError if every replica is lost."""
        if all(replica.state == "lost" for replica in self._replicas):
            raise RolloutError(
                f"all {len(self._replicas)} replicas are lost; each was restarted up to "
                f"{self.settings.section}.replica.max_restarts={self.settings.max_restarts} times, see their logs"
            )

    # -- many requests ------------------------------------------------------------------------

    async def generate_many(
        self,
        requests: Sequence[RolloutRequest],
        progress: Progress | None = None,
        stragglers: Stragglers | None = None,
    ) -> list[RolloutOutput | RollcastError]:
        """Return an output or an error for each request, in the requests' order.

        Requests with equal prompt and sampling go to a replica together, longest prompts first. A replica takes the
        next ones as soon as one of its sequences has ended. Requests that a dead replica has not answered return to the
        queue.

        Args:
            requests: requests to answer.
            progress: called with the number of answered requests and the total.
            stragglers: policy for cutting late requests, whose ids must be unique among those in flight; None waits for
                all. A request that was cut before its first token is sent again.

        Raises:
            RolloutError: no replica is left.
        """
        if not requests:
            return []
        job = _Job(requests, progress)
        cut = asyncio.ensure_future(self._cut_late(job, stragglers)) if stragglers is not None else None
        try:
            await self._run(job, lambda: self._submit(job))
        finally:
            if cut is not None:
                cut.cancel()
        if cut is not None:
            await self._ask_empty_again(job)
        return [job.answers[index] for index in range(len(requests))]

    async def _cut_late(self, job: _Job, stragglers: Stragglers) -> None:
        """End the remaining requests of a job some time after the others have ended."""
        count, spared = len(job.requests), int(stragglers.share * len(job.requests))
        if not spared:
            return
        while len(job.answers) < count - spared:
            job.answered.clear()
            await job.answered.wait()
        await asyncio.sleep(stragglers.grace_s)
        late = [job.requests[index].request_id for index in range(count) if index not in job.answers]
        logger.warning("%d of %d responses were cut as stragglers", len(late), count)
        self._cut += len(late)
        await self.abort(late)

    async def _ask_empty_again(self, job: _Job) -> None:
        empty = [index for index, answer in job.answers.items() if _is_empty_cut(answer)]
        again = await self.generate_many([job.requests[index] for index in empty])
        self._cut -= len(empty)
        job.answers.update(zip(empty, again, strict=True))

    def _submit(self, job: _Job) -> None:
        self._window.submit(group.entry for group in job.groups())
        self._pump()

    async def _run(self, job: _Job, begin: Callable[[], None]) -> None:
        """Wait for a job; if the caller is cancelled, its requests are withdrawn.

        Raises:
            RolloutError: no replica is left.
        """
        await self._open_windows()
        self.require_any()
        self._jobs.add(job)
        try:
            begin()
            await job.done
        finally:
            self._jobs.discard(job)
            self._window.withdraw(lambda group: group.job is job)
            for send in job.sends:
                send.cancel()

    async def _open_windows(self) -> None:
        """Ask new engines how many sequences they compute at once."""
        new = [
            place
            for place, replica in enumerate(self._replicas)
            if replica.state == "up" and not self._window.is_open(place)
        ]
        await asyncio.gather(*(self._open_window(place) for place in new))

    async def _open_window(self, place: int) -> None:
        replica = self._replicas[place]
        client = replica.client
        try:
            load = await client.first_load()
        except ReplicaGoneError as error:
            if replica.client is client:
                await self._lose(replica, error)
            return
        if replica.client is client and replica.state == "up" and not self._window.is_open(place):
            self._window.open(place, load)
            client.on_load = lambda heard: self._hear(place, client, heard)
            self._figures.add(place, load)
            self._pump()

    def _hear(self, place: int, client: ReplicaClient, load: EngineLoad | None) -> None:
        if load is not None and self._replicas[place].client is client:
            self._window.hear(place, load)
            self._figures.add(place, load)
            self._pump_soon()

    def _pump_soon(self) -> None:
        """Schedule one assignment for all sequences that end in this turn of the event loop."""
        if not self._pumps and self._window.waiting:
            self._pumps = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pumps = False
        batches: dict[tuple[int, _Job], list[_Group]] = {}
        for place, group in self._window.assign():
            batches.setdefault((place, group.job), []).append(group)
        for (place, job), groups in batches.items():
            self._send_to(place, job, groups)

    def _send_to(self, place: int, job: _Job, groups: Sequence[_Group]) -> None:
        if job.session_id is not None:
            self._remember(job.session_id, place)
        task = asyncio.ensure_future(self._send(place, job, [index for group in groups for index in group.indices]))
        job.sends.add(task)
        task.add_done_callback(lambda ended: self._end_send(job, ended))

    def _end_send(self, job: _Job, send: asyncio.Task[None]) -> None:
        job.sends.discard(send)
        if not send.cancelled() and (error := send.exception()) is not None:
            job.fail(error)

    async def _send(self, place: int, job: _Job, indices: Sequence[int]) -> None:
        replica, left = self._replicas[place], dict.fromkeys(indices)
        try:
            async with contextlib.aclosing(
                replica.client.generate([job.requests[index] for index in indices])
            ) as answers:
                async for number, output in answers:
                    del left[indices[number]]
                    self._window.finish(place, job.sequences([indices[number]]))
                    self._pump_soon()
                    job.answer(indices[number], output)
        except ReplicaGoneError as error:
            await self._lose(replica, error)
            for index in left:
                self._try_again(job, index)
        finally:
            self._window.finish(place, job.sequences(left))
            self._pump_soon()

    def _try_again(self, job: _Job, index: int) -> None:
        job.attempts[index] = job.attempts.get(index, 0) + 1
        if job.attempts[index] >= self.settings.max_attempts:
            job.answer(index, self._given_up(job.requests[index]))
        elif not job.done.done():
            self._window.put_back(*_Group(job, (index,)).entry)
        self._fail_if_lost()

    def _fail_if_lost(self) -> None:
        """Fail the jobs if no replica is left."""
        try:
            self.require_any()
        except RolloutError as error:
            for job in self._jobs:
                job.fail(RolloutError(str(error)))

    def _given_up(self, request: RolloutRequest) -> RolloutError:
        return RolloutError(
            f"request {request.request_id!r} failed: {self.settings.max_attempts} replicas died while they held it"
        )

    # -- replicas that die --------------------------------------------------------------------

    async def lose(self, deaths: Mapping[int, RollcastError]) -> None:
        """Remove replicas that another caller found dead from the routing, and restart them.

        Args:
            deaths: error by the replica's number.
        """
        for replica in self._replicas:
            if replica.address.index in deaths:
                await self._lose(replica, deaths[replica.address.index])

    async def _lose(self, replica: _Replica, error: RollcastError) -> None:
        """Remove a replica from the routing, and restart it if allowed."""
        if replica.state != "up":  # another of its requests noticed first
            return
        can = self._revive is not None and replica.restarts < self.settings.max_restarts
        replica.state = "reviving" if can else "lost"
        self._window.close(self._replicas.index(replica))
        self._fail_if_lost()
        logger.warning("%s; %s", error, "restarting it" if can else "it is lost")
        # Connections are left to break with the process: other requests may be reading from them.
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
            replica.state = state
            self._fail_if_lost()
        if state == "up":
            await self._open_window(self._replicas.index(replica))
        else:
            logger.error("replica %d is lost after %d restarts", index, replica.restarts)
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
        """Check every replica's engine; dead replicas are restarted, and awaited.

        Raises:
            RolloutError: no replica is left.
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
            raise ReplicaGoneError(f"{client.where} returned no answer")

        return await self._ask_each(one)

    async def call_all(self, path: str, body: dict[str, Any]) -> None:
        """POST to every replica.

        Raises:
            RollcastError: first error that a replica answered with.
        """
        await self._ask_each(lambda client: client.call(path, body))

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End requests of this manager's callers (None for all) on all replicas."""
        up = [replica.client for replica in self._replicas if replica.state == "up"]
        answers = await asyncio.gather(*(client.abort(request_ids) for client in up), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, ReplicaGoneError):
                raise answer

    async def _ask_each(self, ask: Callable[[ReplicaClient], Awaitable[T]]) -> list[T]:
        """Return every replica's answer; a replica that dies meanwhile is restarted and asked again.

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
        """Close the connections; the replicas keep running."""
        for task in self._reviving:
            task.cancel()
        for client in (*self._retired, *(replica.client for replica in self._replicas)):
            await client.close()
