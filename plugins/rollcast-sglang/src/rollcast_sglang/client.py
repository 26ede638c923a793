"""SGLang's HTTP endpoints, as the rollout uses them.

Each call has a connection of its own: a rollout is used from several event loops one after the other, and a
server that closes an idle connection at the wrong moment would lose a request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from rollcast.errors import RolloutError
from rollcast_sglang.process import ServerProcess

__all__ = ["RefusedError", "SglangClient"]

_READY_POLL_S = 0.1
_HEALTH_S = 5.0
#: How long a process may take to end after its connections broke.
_DEATH_S = 2.0
_PREFIX = b"data: "
_END = b"[DONE]"


class RefusedError(RolloutError):
    """The server is well, and refused a call."""


class SglangClient:
    """Calls one server.

    Every call raises RolloutError if the server is gone, or answers with an error.
    """

    def __init__(self, server: ServerProcess) -> None:
        self._server = server

    async def wait_ready(self, timeout_s: float) -> dict[str, Any]:
        """Wait until the server serves; gives what it says about itself.

        Raises:
            RolloutError: it ended, or was not ready in time.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not await self._answers_health():
            if not self._server.is_alive:
                raise self._server.death("SGLang's server did not start")
            if asyncio.get_running_loop().time() > deadline:
                raise self._server.death(
                    f"SGLang's server was not ready within rollout.replica.launch_timeout_s={timeout_s:g}"
                )
            await asyncio.sleep(_READY_POLL_S)
        return await self.server_info(timeout_s)

    async def server_info(self, timeout_s: float) -> dict[str, Any]:
        """What the server says about itself; the schedulers answer too, so that it shows that they live."""
        async with self._telling("/server_info"), self._request("GET", "/server_info", None, timeout_s) as response:
            info: dict[str, Any] = await response.json(content_type=None)
            return info

    async def load(self, timeout_s: float) -> dict[str, Any]:
        """Return the load that the scheduler published last; empty before its first step."""
        path = "/v1/loads?include=core"
        async with self._telling(path), self._request("GET", path, None, timeout_s) as response:
            loads: list[dict[str, Any]] = (await response.json(content_type=None)).get("loads") or [{}]
            return loads[0]

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """Call an endpoint that changes something.

        Raises:
            RolloutError: also if it answers ``success: false``, with its message.
        """
        async with self._telling(path), self._request("POST", path, body or {}, None) as response:
            text = await response.text()
        answer = json.loads(text) if text.startswith("{") else {}
        if response.status >= 400 or answer.get("success") is False:
            reason = answer.get("message") or answer.get("error_message") or text
            raise RolloutError(f"SGLang answered {path} with {response.status}: {reason}")

    async def generate(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Call ``/generate`` with a batch, streaming; gives each event as it comes."""
        streaming = {**body, "stream": True}
        async with self._telling("/generate"), self._request("POST", "/generate", streaming, None) as response:
            if response.status >= 400:
                raise RefusedError(f"SGLang answered /generate with {response.status}: {await response.text()}")
            rest = bytearray()
            async for chunk in response.content.iter_any():
                rest += chunk
                *events, rest = rest.split(b"\n\n")
                for event in events:
                    payload = bytes(event[len(_PREFIX) :])
                    if event.startswith(_PREFIX) and payload != _END:
                        yield json.loads(payload)

    async def _answers_health(self) -> bool:
        try:
            async with self._request("GET", "/health", None, _HEALTH_S) as response:
                return response.status < 400
        except (aiohttp.ClientError, TimeoutError):
            return False

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        headers = {"Authorization": f"Bearer {self._server.api_key}"}
        async with (
            aiohttp.ClientSession(self._server.url, timeout=timeout, headers=headers) as session,
            session.request(method, path, json=body) as response,
        ):
            yield response

    @asynccontextmanager
    async def _telling(self, path: str) -> AsyncIterator[None]:
        """Say of a broken connection what is known of the server."""
        try:
            yield
        except TimeoutError as error:
            raise RolloutError(f"SGLang's server did not answer {path} in time") from error
        except aiohttp.ClientError as error:
            deadline = asyncio.get_running_loop().time() + _DEATH_S
            while self._server.is_alive and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(_READY_POLL_S)
            if self._server.is_alive:
                raise RolloutError(f"the connection to SGLang's server broke during {path}: {error!r}") from error
            raise self._server.death("SGLang's server died") from error
