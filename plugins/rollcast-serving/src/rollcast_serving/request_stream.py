"""The replica's end of a caller's stream: requests arrive, and each output is sent when it ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

import msgpack
from aiohttp import WSMsgType, web

from rollcast.contracts.rollout import BaseRollout, RolloutRequest
from rollcast.errors import RequestError, RollcastError
from rollcast_serving.engine_watch import EngineWatch
from rollcast_serving.wire import decode_requests, encode_error, encode_load, encode_output, unpack

__all__ = ["LoadWatch", "RequestStream", "describe_failure"]

logger = logging.getLogger(__name__)
#: Seconds between two queries of the engine's load.
_LOAD_S = 1.0


async def describe_failure(error: Exception, what: str, watch: EngineWatch) -> dict[str, Any]:
    """Return an error as a message, after checking whether the engine is dead."""
    if not isinstance(error, RollcastError):
        logger.error("%s failed", what, exc_info=error)
    # The stream itself reports the engine's death if that is the cause.
    await watch.blame(error)
    return {"error": encode_error(error)}


class LoadWatch:
    """The engine's load, queried at most once a second for all callers.

    Args:
        rollout: rollout with the engine.
    """

    def __init__(self, rollout: BaseRollout) -> None:
        self._rollout = rollout
        self._found: list[float] = []
        self._asked = 0.0
        self._asking: asyncio.Task[None] | None = None

    async def first(self) -> list[float]:
        """Return the current load."""
        await self._ask()
        return self._found

    def latest(self) -> list[float]:
        """Return the last known load; start a new query if it is old."""
        if time.monotonic() - self._asked > _LOAD_S and (self._asking is None or self._asking.done()):
            self._asking = asyncio.ensure_future(self._renew())
        return self._found

    async def _renew(self) -> None:
        try:
            await self._ask()
        except RollcastError as error:  # requests and health checks report a dead engine
            logger.warning("the engine does not report its load: %s", error)

    async def _ask(self) -> None:
        self._asked = time.monotonic()
        self._found = encode_load(await self._rollout.report_load())


class RequestStream:
    """One caller's WebSocket.

    Incoming messages submit requests or cancel some (``{"cancel": [ids]}``). Outgoing ones are lists of messages:
    outputs, errors, heartbeats, loads, and the engine's death, which ends the stream.

    Args:
        socket: prepared connection.
        rollout: rollout that answers.
        watch: health check of the rollout's engine.
        loads: load of the rollout's engine.
    """

    def __init__(
        self, socket: web.WebSocketResponse, rollout: BaseRollout, watch: EngineWatch, loads: LoadWatch
    ) -> None:
        self._socket, self._rollout, self._watch, self._loads = socket, rollout, watch, loads
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._outgoing: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._told: list[float] = []

    async def run(self, heartbeat_s: float) -> None:
        """Serve until the caller is gone or the engine is dead."""
        writer = asyncio.ensure_future(self._write(heartbeat_s))
        try:
            async for message in self._socket:
                if message.type is not WSMsgType.BINARY:
                    break
                self._take(message.data)
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            for task in self._tasks.values():
                task.cancel()

    def _take(self, data: bytes) -> None:
        try:
            message = unpack(data)
            cancelled = message.get("cancel") if isinstance(message, Mapping) else None
            if cancelled is None:
                for request in decode_requests(data):
                    self._tasks[request.request_id] = asyncio.ensure_future(self._answer(request))
                return
        except ValueError as error:
            refusal = error if isinstance(error, RequestError) else RequestError(f"not a valid request: {error}")
            self._outgoing.put_nowait({"refused": encode_error(refusal)})
            return
        for name in cancelled:
            if name in self._tasks:
                self._tasks.pop(name).cancel()

    async def _answer(self, request: RolloutRequest) -> None:
        name = request.request_id
        try:
            message = {"output": encode_output(await self._rollout.generate(request))}
        except Exception as error:  # noqa: BLE001  # it travels to the caller
            message = await describe_failure(error, f"request {name}", self._watch)
        self._tasks.pop(name, None)
        self._outgoing.put_nowait({"id": name, **message})

    async def _write(self, heartbeat_s: float) -> None:
        try:
            await self._send([{"load": await self._loads.first()}])
        except RollcastError as error:
            await self._watch.blame(error)
            await self._send([{"refused": encode_error(error)}])
        while not self._watch.death:
            await self._send(await self._next(heartbeat_s))
        await self._send([{"gone": self._watch.death}])
        await self._socket.close()

    async def _next(self, heartbeat_s: float) -> list[dict[str, Any]]:
        """Return the next messages to send, at the latest when a heartbeat is due."""
        try:
            messages = [await asyncio.wait_for(self._outgoing.get(), heartbeat_s)]
        except TimeoutError:
            messages = [{"alive": True}]
            self._watch.start()
        while not self._outgoing.empty():
            messages.append(self._outgoing.get_nowait())
        if self._watch.death:  # a dead engine's outputs are still valid; another replica can answer the rest
            return [message for message in messages if "output" in message]
        load = self._loads.latest()
        if load != self._told:
            self._told = load
            messages.append({"load": load})
        return messages

    async def _send(self, messages: list[dict[str, Any]]) -> None:
        await self._socket.send_bytes(msgpack.packb(messages))
