"""Calls to an engine's HTTP server.

Each call opens its own connection: a rollout is used from several event loops in succession, and a server that closes
an idle connection at the wrong moment would lose a request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from rollcast.errors import RolloutError
from rollcast_serving.engines.server_process import ServerProcess

__all__ = ["EngineClient", "RefusedError"]

_READY_POLL_S = 0.1
_HEALTH_S = 5.0
#: Seconds that a process may take to end after its connections broke.
_DEATH_S = 2.0
_PREFIX = b"data: "
_END = b"[DONE]"


class RefusedError(RolloutError):
    """The server is healthy but refused a call."""


class EngineClient:
    """A client of one server; every call raises RolloutError if the server is gone or answers with an error.

    Args:
        server: process of the server.
    """

    def __init__(self, server: ServerProcess) -> None:
        self._server = server

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until ``/health`` answers.

        Raises:
            RolloutError: the server ended, or was not ready in time.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not await self._answers_health():
            name = f"{self._server.engine}'s server"
            if not self._server.is_alive:
                raise self._server.death(f"{name} did not start")
            if asyncio.get_running_loop().time() > deadline:
                limit = f"rollout.replica.launch_timeout_s={timeout_s:g}"
                raise self._server.death(f"{name} was not ready within {limit}")
            await asyncio.sleep(_READY_POLL_S)

    async def get(self, path: str, timeout_s: float) -> Any:
        """Return the JSON answer of an endpoint."""
        async with self._telling(path), self._request("GET", path, None, timeout_s) as response:
            await self._refuse(path, response)
            return await response.json(content_type=None)

    async def post(self, path: str, body: Mapping[str, Any] | bytes | None = None, **headers: str) -> str:
        """Call an endpoint that changes something; return the text of its answer.

        Raises:
            RefusedError: the status is not a success.
        """
        async with self._telling(path), self._request("POST", path, body or {}, None, headers) as response:
            await self._refuse(path, response)
            return await response.text()

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the server-sent events of a call as they arrive."""
        async with self._telling(path), self._request("POST", path, body, None) as response:
            await self._refuse(path, response)
            rest = bytearray()
            async for chunk in response.content.iter_any():
                rest += chunk
                *events, rest = rest.split(b"\n\n")
                for event in events:
                    payload = bytes(event[len(_PREFIX) :])
                    if event.startswith(_PREFIX) and payload != _END:
                        yield json.loads(payload)

    async def _refuse(self, path: str, response: aiohttp.ClientResponse) -> None:
        if response.status >= 400:
            text = await response.text()
            raise RefusedError(f"{self._server.engine} answered {path} with {response.status}: {text}")

    async def _answers_health(self) -> bool:
        try:
            async with self._request("GET", "/health", None, _HEALTH_S) as response:
                return response.status < 400
        except (aiohttp.ClientError, TimeoutError):
            return False

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | bytes | None,
        timeout_s: float | None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        own = {"Authorization": f"Bearer {self._server.api_key}", **(headers or {})}
        content: dict[str, Any] = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with (
            aiohttp.ClientSession(self._server.url, timeout=timeout, headers=own) as session,
            session.request(method, path, **content) as response,
        ):
            yield response

    @asynccontextmanager
    async def _telling(self, path: str) -> AsyncIterator[None]:
        """Report the end of the server if it explains a broken connection."""
        name = f"{self._server.engine}'s server"
        try:
            yield
        except TimeoutError as error:
            raise RolloutError(f"{name} did not answer {path} in time") from error
        except aiohttp.ClientError as error:
            deadline = asyncio.get_running_loop().time() + _DEATH_S
            while self._server.is_alive and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(_READY_POLL_S)
            if self._server.is_alive:
                raise RolloutError(f"the connection to {name} broke during {path}: {error!r}") from error
            raise self._server.death(f"{name} died") from error
