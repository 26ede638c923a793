"""SGLang's HTTP endpoints, as the rollout uses them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from rollcast.errors import RolloutError
from rollcast_serving.engines.http_client import EngineClient

__all__ = ["SglangClient"]


class SglangClient(EngineClient):
    """A client of one SGLang server."""

    async def server_info(self, timeout_s: float) -> dict[str, Any]:
        """Return the server's description of itself; it includes the schedulers' answers, which shows that they are
        alive.
        """
        info: dict[str, Any] = await self.get("/server_info", timeout_s)
        return info

    async def load(self, timeout_s: float) -> dict[str, Any]:
        """Return the load that the scheduler last published; empty before its first step."""
        loads: list[dict[str, Any]] = (await self.get("/v1/loads?include=core", timeout_s)).get("loads") or [{}]
        return loads[0]

    async def change(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """Call an endpoint that changes something.

        Raises:
            RolloutError: it answers ``success: false`` or an error status; the message is SGLang's.
        """
        text = await self.post(path, body)
        answer = json.loads(text) if text.startswith("{") else {}
        if answer.get("success") is False:
            reason = answer.get("message") or answer.get("error_message") or text
            raise RolloutError(f"SGLang refused {path}: {reason}")

    def generate(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Call ``/generate`` with a batch; yield each event as it arrives."""
        return self.stream("/generate", {**body, "stream": True})
