"""Callers of a replica: asynchronous for generation, blocking for weights."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp

from rollcast.contracts.rollout import RolloutOutput, RolloutRequest
from rollcast.contracts.weights import WeightReport
from rollcast.errors import RollcastError, RolloutError
from rollcast_serving.launcher import ReplicaAddress
from rollcast_serving.wire import decode_error, decode_output, decode_report, encode_request

__all__ = ["ReplicaClient", "ReplicaGoneError", "ReplicaReceiver"]


#: Index of the request, and what became of it.
Answer = tuple[int, RolloutOutput | RollcastError]


class ReplicaGoneError(RolloutError):
    """A replica does not answer any more; what it was doing can be done by another."""


def _headers(address: ReplicaAddress) -> dict[str, str]:
    return {"Authorization": f"Bearer {address.token}"}


class ReplicaClient:
    """Talks to one replica from one event loop.

    Args:
        address: of the replica.
        timeout_s: how long a replica may be silent while requests are under way.
    """

    def __init__(self, address: ReplicaAddress, timeout_s: float = 1800.0) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=_headers(self.address),
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=self._timeout_s),
                read_bufsize=1 << 22,
            )
        return self._session

    @property
    def where(self) -> str:
        """The replica, for messages."""
        return f"replica {self.address.index} on {self.address.node}"

    async def generate(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[Answer]:
        """Outputs as they come, each with its request's index; an error stands for a request that failed.

        Raises:
            ReplicaGoneError: the replica went away or is silent; what has not come is not answered.
        """
        body = {"requests": [{**encode_request(request), "id": str(n)} for n, request in enumerate(requests)]}
        left = len(requests)
        try:
            async with self._connected().post(f"{self.address.url}/generate", json=body) as response:
                if response.status != 200:
                    raise await self._refused(response)
                async for line in response.content:
                    index, output = self._read(line, requests)
                    left -= 1
                    yield index, output
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            if isinstance(error, RollcastError):
                raise
            raise ReplicaGoneError(f"{self.where} went away: {type(error).__name__}: {error}") from error
        if left:
            raise ReplicaGoneError(f"{self.where} ended with {left} of {len(requests)} requests unanswered")

    def _read(self, line: bytes, requests: Sequence[RolloutRequest]) -> Answer:
        data = json.loads(line)
        index = int(data["id"])
        request = requests[index]
        if "error" in data:
            return index, decode_error(data["error"], self.where)
        return index, decode_output({**data, "id": request.request_id}, request.sampling)

    async def _refused(self, response: aiohttp.ClientResponse) -> RollcastError:
        text = await response.text()
        try:
            return decode_error(json.loads(text)["error"], self.where)
        except (ValueError, KeyError):
            return RolloutError(f"{self.where} answered {response.status}: {text.strip()[:500]}")

    async def call(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        """POST, or GET without a body; the JSON that comes back.

        Raises:
            ReplicaGoneError: it does not answer.
            RollcastError: what it answered, if that is an error.
        """
        method = "GET" if body is None else "POST"
        try:
            async with asyncio.timeout(timeout_s or self._timeout_s):
                url = f"{self.address.url}/{path}"
                async with self._connected().request(method, url, json=body) as response:
                    if response.status != 200:
                        raise await self._refused(response)
                    return await response.json()
        except (aiohttp.ClientError, OSError) as error:
            raise ReplicaGoneError(f"{self.where} does not answer /{path}: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


class ReplicaReceiver:
    """A replica as the target of a weight sync; see :class:`rollcast_serving.weight_sync.RemoteRollout`.

    Args:
        address: of the replica.
        timeout_s: until it has to have loaded everything.
    """

    def __init__(self, address: ReplicaAddress, timeout_s: float = 600.0) -> None:
        self.address = address
        self.node = address.node
        self._timeout_s = timeout_s

    def receive_weights(self, sync: str, source: Mapping[str, Any], version: int) -> WeightReport:
        """See the protocol; blocks.

        Raises:
            WeightSyncError: the replica could not load them.
            ReplicaGoneError: it went away.
        """
        where = f"replica {self.address.index} on {self.node}"
        body = json.dumps({"sync": sync, "source": dict(source), "version": version}).encode()
        request = urllib.request.Request(  # noqa: S310  # the URL is one of our own
            f"{self.address.url}/update_weights",
            data=body,
            headers={**_headers(self.address), "Content-Type": "application/json"},
        )
        # No proxy: the address is one of our own.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=self._timeout_s) as response:
                return decode_report(json.load(response))
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            try:
                failure = decode_error(json.loads(text)["error"], where)
            except (ValueError, KeyError):
                failure = RolloutError(f"{where} answered {error.code}: {text.strip()[:500]}")
            raise failure from None
        except OSError as error:
            raise ReplicaGoneError(f"{where} went away during a weight update: {error}") from error
