"""The HTTP server of a replica: one rollout engine, and the calls of its callers."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from rollcast.contracts.rollout import BaseRollout
from rollcast.contracts.weights import AdapterWeights, WeightBucket, WeightReport
from rollcast.errors import RequestError, RollcastError
from rollcast_serving.contracts.weight_sync import weight_syncs
from rollcast_serving.engine_watch import EngineWatch
from rollcast_serving.receiving import WeightTally
from rollcast_serving.request_stream import LoadWatch, RequestStream, describe_failure
from rollcast_serving.wire import encode_error, encode_report, pack_frame

__all__ = ["HEARTBEAT_S", "Handler", "IncomingWeights", "build_app", "check_token"]

logger = logging.getLogger(__name__)
_MAX_BODY = 1 << 30
#: Seconds between two heartbeats of a stream.
HEARTBEAT_S = 5.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class IncomingWeights:
    """Buckets that a trainer sends; picklable, so that an engine's own processes can iterate over them.

    Attributes:
        sync: registry name of the weight sync.
        source: the sender's description of where to get the buckets.
        reader, readers: index and number of the replica's processes that iterate over the buckets.
    """

    sync: str
    source: Mapping[str, Any] = field(repr=False)
    reader: int = 0
    readers: int = 1

    def for_reader(self, index: int, count: int) -> IncomingWeights:
        """Return the buckets for one process; see :class:`rollcast_serving.receiving.BucketsForReaders`."""
        return replace(self, reader=index, readers=count)

    def __iter__(self) -> Iterator[WeightBucket]:
        source = {**self.source, "reader": self.reader, "readers": self.readers}
        return iter(weight_syncs.get(self.sync, requested_by="rollout.weight_sync").open(source))


def check_token(request: web.Request, token: str) -> None:
    """Check that the caller knows the replica's token.

    Raises:
        web.HTTPUnauthorized: the header ``Authorization: Bearer TOKEN`` is missing or wrong.
    """
    header = request.headers.get("Authorization", "")
    if not hmac.compare_digest(header.encode(), f"Bearer {token}".encode()):
        raise web.HTTPUnauthorized(text="this endpoint needs the replica's token: Authorization: Bearer TOKEN\n")


def guard(token: str) -> Any:
    """Return middleware that checks the token, and answers errors as JSON."""

    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        check_token(request, token)
        try:
            return await handler(request)
        except RollcastError as error:
            status = 400 if isinstance(error, RequestError) else 500
            return web.json_response({"error": encode_error(error)}, status=status)
        except json.JSONDecodeError as error:
            return web.json_response({"error": encode_error(RequestError(f"not JSON: {error}"))}, status=400)

    return checked


class _Endpoints:
    """The routes, over one rollout."""

    def __init__(self, rollout: BaseRollout, watch: EngineWatch, heartbeat_s: float) -> None:
        self.rollout = rollout
        self._watch, self._heartbeat_s = watch, heartbeat_s
        self._loads = LoadWatch(rollout)
        self._updating = asyncio.Lock()

    async def health(self, request: web.Request) -> web.StreamResponse:
        return await self._reply(request, self._look())

    async def _look(self) -> dict[str, Any]:
        await self._watch.look()
        return {}

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Take requests and send each output when it is ready, while the caller is connected."""
        socket = web.WebSocketResponse(max_msg_size=_MAX_BODY, compress=False)
        await socket.prepare(request)
        await RequestStream(socket, self.rollout, self._watch, self._loads).run(self._heartbeat_s)
        return socket

    async def abort(self, request: web.Request) -> web.StreamResponse:
        """End requests by the ids of their caller, which are unique among all callers."""
        names = (await request.json()).get("ids")
        if not isinstance(names, list):
            raise RequestError('an abort needs {"ids": [...]}')
        return await self._reply(request, self.rollout.abort(names))

    async def update_weights(self, request: web.Request) -> web.StreamResponse:
        return await self._reply(request, self._update(await request.json()))

    async def _update(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        async with self._updating:
            incoming, version = IncomingWeights(asked["sync"], asked["source"]), int(asked["version"])
            if "adapter" in asked["source"]:
                report = await self._update_adapter(incoming, asked["source"]["adapter"], version)
            else:
                report = await self.rollout.update_weights(incoming, version)
        return encode_report(report)

    async def _update_adapter(self, incoming: IncomingWeights, config: Mapping[str, Any], version: int) -> WeightReport:
        # In a thread: reading waits for the trainer, and the heartbeats of other requests must continue.
        tally, tensors = await asyncio.to_thread(_read_all, incoming)
        loaded = await self.rollout.update_adapter(AdapterWeights(config, tensors), version)
        return replace(tally.report(loaded.version), load_seconds=loaded.seconds)

    async def release(self, request: web.Request) -> web.StreamResponse:
        return await self._reply(request, self.rollout.release((await request.json())["tags"]))

    async def resume(self, request: web.Request) -> web.StreamResponse:
        return await self._reply(request, self.rollout.resume((await request.json())["tags"]))

    async def _reply(self, request: web.Request, work: Awaitable[Any]) -> web.StreamResponse:
        """Send heartbeats until ``work`` ends, then answer with its result."""
        task = asyncio.ensure_future(self._finish(work, request.path))
        try:
            response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
            await response.prepare(request)
            await self._wait(response, task)
            await response.write_eof()
        finally:
            task.cancel()
        return response

    async def _wait(self, response: web.StreamResponse, task: asyncio.Task[dict[str, Any]]) -> None:
        while not task.done():
            await asyncio.wait([task], timeout=self._heartbeat_s)
            if self._watch.death:
                break
            if not task.done():
                await response.write(pack_frame({"alive": True}))
                self._watch.start()
        message = {"gone": self._watch.death} if self._watch.death else task.result()
        await response.write(pack_frame(message))

    async def _finish(self, work: Awaitable[Any], path: str) -> dict[str, Any]:
        try:
            return {"result": await work or {}}
        except Exception as error:  # noqa: BLE001  # it travels to the caller
            return await describe_failure(error, path, self._watch)


def _read_all(incoming: IncomingWeights) -> tuple[WeightTally, dict[str, Any]]:
    tally = WeightTally(incoming)
    return tally, {name: tensor.clone() for bucket in tally for name, tensor in bucket}


def build_app(
    rollout: BaseRollout, token: str, watch: EngineWatch, heartbeat_s: float = HEARTBEAT_S
) -> web.Application:
    """Return the application for a replica's callers in the run.

    Args:
        rollout: rollout that answers.
        token: secret that callers must send.
        watch: health check of the rollout's engine.
        heartbeat_s: seconds between two heartbeats of a stream.
    """
    app = web.Application(middlewares=[guard(token)], client_max_size=_MAX_BODY)
    endpoints = _Endpoints(rollout, watch, heartbeat_s)
    for name in ("health", "abort", "update_weights", "release", "resume"):
        app.router.add_post(f"/{name}", getattr(endpoints, name))
    app.router.add_get("/stream", endpoints.stream)
    return app
