"""Clients of a replica: asynchronous for generation, blocking for weights."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import aiohttp

from rollcast.contracts.rollout import EngineLoad, RolloutOutput, RolloutRequest
from rollcast.contracts.weights import WeightReport
from rollcast.errors import RollcastError, RolloutError
from rollcast_serving.frames import read_frames, read_frames_blocking
from rollcast_serving.launcher import ReplicaAddress
from rollcast_serving.replica_stream import BROKEN, ReplicaGoneError, ReplicaStream
from rollcast_serving.wire import decode_error, decode_output, decode_report, encode_requests

__all__ = ["SILENCE_S", "Answer", "ReplicaClient", "ReplicaGoneError", "ReplicaReceiver"]

#: Maximum seconds without a message from a living replica, which sends heartbeats.
SILENCE_S = 120.0
#: Index of a request, and its output or error.
Answer = tuple[int, RolloutOutput | RollcastError]


def _headers(address: ReplicaAddress) -> dict[str, str]:
    return {"Authorization": f"Bearer {address.token}"}


def _name(address: ReplicaAddress) -> str:
    return f"replica {address.index} on {address.node}"


def _result(message: Mapping[str, Any], where: str) -> Any:
    """Return a frame's result.

    Raises:
        ReplicaGoneError: the frame reports that the engine is dead.
        RollcastError: the frame contains an error.
    """
    if "gone" in message:
        raise ReplicaGoneError(f"{where}: its engine is dead: {message['gone']}")
    if "error" in message:
        raise decode_error(message["error"], where)
    return message["result"]


class ReplicaClient:
    """A client of one replica, used from one event loop.

    Args:
        address: address of the replica.
        silence_s: maximum seconds without an output or a heartbeat.
    """

    def __init__(self, address: ReplicaAddress, silence_s: float = SILENCE_S) -> None:
        self.address = address
        self._silence_s = silence_s
        self._session: aiohttp.ClientSession | None = None
        self._prefix = secrets.token_hex(8)
        self._numbers = itertools.count()
        #: The caller's request ids, by the unique ids on the wire.
        self._in_flight: dict[str, str] = {}
        self._stream: ReplicaStream | None = None
        self._opening = asyncio.Lock()
        #: Called with each load that the replica reports, and with None for a heartbeat.
        self.on_load: Callable[[EngineLoad | None], None] | None = None

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=_headers(self.address),
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=self._silence_s),
                read_bufsize=1 << 22,
            )
        return self._session

    @property
    def where(self) -> str:
        """Name of the replica, for messages."""
        return _name(self.address)

    async def generate(self, requests: Sequence[RolloutRequest]) -> AsyncGenerator[Answer, None]:
        """Yield outputs as they arrive, each with its request's index; a failed request yields an error.

        All requests of this client share one connection. If the caller stops iterating, the remaining requests are
        cancelled.

        Raises:
            ReplicaGoneError: the replica or its engine is dead or silent; requests not yet yielded stay unanswered.
        """
        names = {f"{self._prefix}/{next(self._numbers)}": index for index in range(len(requests))}
        body, refused = encode_requests({name: requests[index] for name, index in names.items()})
        for name, error in refused.items():
            yield names[name], error
        left = {name: names[name] for name in names if name not in refused}
        if not left:
            return
        stream = await self._streaming()
        self._in_flight |= {name: requests[index].request_id for name, index in left.items()}
        answers = stream.expect(left)
        try:
            await stream.send(body)
            while left:
                message = await answers.get()
                if message is None:
                    raise ReplicaGoneError(f"{stream.end}, with {len(left)} of {len(requests)} requests unanswered")
                index = left.pop(message["id"])
                del self._in_flight[message["id"]]
                yield index, self._answer(message, requests[index])
        finally:
            for name in left:
                self._in_flight.pop(name, None)
            await stream.forget(left)

    async def first_load(self) -> EngineLoad:
        """Return the engine's load when the connection was opened; later loads go to :attr:`on_load`.

        Raises:
            ReplicaGoneError: the replica or its engine is dead, or silent.
        """
        return await (await self._streaming()).first_load()

    async def _streaming(self) -> ReplicaStream:
        """Return the open connection for requests; open one if needed."""
        async with self._opening:
            if self._stream is None or self._stream.end:
                self._stream = await ReplicaStream.open(
                    self._connected(), f"{self.address.url}/stream", self.where, self._silence_s, self._hear
                )
            return self._stream

    def _hear(self, load: EngineLoad | None) -> None:
        if self.on_load is not None:
            self.on_load(load)

    def _answer(self, message: Mapping[str, Any], request: RolloutRequest) -> RolloutOutput | RollcastError:
        if "error" in message:
            return decode_error(message["error"], self.where)
        try:
            return decode_output(message["output"], request)
        except RolloutError as error:
            return error

    async def _frames(self, path: str, **body: Any) -> AsyncIterator[dict[str, Any]]:
        """POST, and yield the frames of the answer."""
        try:
            async with self._connected().post(f"{self.address.url}/{path}", **body) as response:
                if response.status != 200:
                    raise await self._refused(response)
                async for message in read_frames(response.content):
                    yield message
        except BROKEN as error:
            if isinstance(error, RollcastError):
                raise
            raise ReplicaGoneError(f"{self.where} broke off during /{path}: {type(error).__name__}: {error}") from error

    async def _refused(self, response: aiohttp.ClientResponse) -> RollcastError:
        text = await response.text()
        try:
            return decode_error(json.loads(text)["error"], self.where)
        except (ValueError, KeyError):
            return RolloutError(f"{self.where} answered {response.status}: {text.strip()[:500]}")

    async def call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """POST and return the result, waiting as long as heartbeats arrive.

        Raises:
            ReplicaGoneError: the replica or its engine is dead, or silent.
            RollcastError: the replica answered with an error.
        """
        async for message in self._frames(path, json=dict(body or {})):
            if "alive" not in message:
                return _result(message, self.where)
        raise ReplicaGoneError(f"{self.where} ended /{path} without an answer")

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End requests of this client (None for all); other clients' requests with the same ids are not affected."""
        wanted = None if request_ids is None else frozenset(request_ids)
        names = [name for name, own in self._in_flight.items() if wanted is None or own in wanted]
        if names:
            await self.call("abort", {"ids": names})

    async def close(self) -> None:
        """Close the connections."""
        if self._stream is not None:
            await self._stream.close()
        if self._session is not None:
            await self._session.close()
            self._session = None


class ReplicaReceiver:
    """A replica as the target of a weight sync; see :class:`rollcast_serving.contracts.weight_sync.RemoteRollout`.

    Args:
        address: address of the replica.
        timeout_s: deadline of an update, in seconds.
        silence_s: maximum seconds without a heartbeat.
    """

    def __init__(self, address: ReplicaAddress, timeout_s: float = 600.0, silence_s: float = SILENCE_S) -> None:
        self.address = address
        self.node = address.node
        self._timeout_s, self._silence_s = timeout_s, silence_s

    def receive_weights(self, sync: str, source: Mapping[str, Any], version: int) -> WeightReport:
        """Load weights; blocks. See :class:`rollcast_serving.contracts.weight_sync.RemoteRollout`.

        Raises:
            WeightSyncError: the replica could not load the weights.
            ReplicaGoneError: the replica or its engine is dead, silent, or late.
        """
        where = _name(self.address)
        body = json.dumps({"sync": sync, "source": dict(source), "version": version}).encode()
        request = urllib.request.Request(  # noqa: S310  # the URL is one of our own
            f"{self.address.url}/update_weights",
            data=body,
            headers={**_headers(self.address), "Content-Type": "application/json"},
        )
        # No proxy: the address is a replica of this run.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        deadline = time.monotonic() + self._timeout_s
        try:
            with opener.open(request, timeout=self._silence_s) as response:
                for message in read_frames_blocking(response):
                    if "alive" not in message:
                        return decode_report(_result(message, where))
                    if time.monotonic() > deadline:
                        raise ReplicaGoneError(f"{where} did not load the weights within {self._timeout_s:g} s")
        except urllib.error.HTTPError as error:
            raise RolloutError(
                f"{where} answered {error.code}: {error.read().decode(errors='replace')[:500]}"
            ) from None
        except (OSError, EOFError, ValueError, http.client.HTTPException) as error:
            if isinstance(error, RollcastError):
                raise
            raise ReplicaGoneError(f"{where} disconnected during a weight update: {error!r}") from error
        raise ReplicaGoneError(f"{where} ended a weight update without an answer")
