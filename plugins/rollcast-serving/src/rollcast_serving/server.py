"""The HTTP server of a replica: one rollout engine, and everything that callers may ask of it."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from rollcast.contracts.rollout import BaseRollout, RolloutRequest
from rollcast.contracts.weights import AdapterWeights, WeightBucket, WeightReport
from rollcast.errors import RequestError, RollcastError
from rollcast_serving.engine_watch import EngineWatch
from rollcast_serving.receiving import WeightTally
from rollcast_serving.weight_sync import weight_syncs
from rollcast_serving.wire import decode_requests, encode_error, encode_output, encode_report, pack_frame

__all__ = ["HEARTBEAT_S", "Handler", "IncomingWeights", "build_app", "check_token"]

logger = logging.getLogger(__name__)
_MAX_BODY = 1 << 30
#: Time between two heartbeats of a stream, in seconds.
HEARTBEAT_S = 5.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class IncomingWeights:
    """Buckets on their way from a trainer; can be pickled, and gone through in an engine's own processes.

    Attributes:
        sync: registry name of the weight sync.
        source: where it gets them from.
        reader, readers: number of the process of this replica that goes through them, and of how many.
    """

    sync: str
    source: Mapping[str, Any] = field(repr=False)
    reader: int = 0
    readers: int = 1

    def for_reader(self, index: int, count: int) -> IncomingWeights:
        """See :class:`rollcast_serving.receiving.BucketsForReaders`."""
        return replace(self, reader=index, readers=count)

    def __iter__(self) -> Iterator[WeightBucket]:
        source = {**self.source, "reader": self.reader, "readers": self.readers}
        return iter(weight_syncs.get(self.sync, requested_by="rollout.weight_sync").open(source))


def check_token(request: web.Request, token: str) -> None:
    """Refuse whoever does not know the replica's token.

    Raises:
        web.HTTPUnauthorized: the header ``Authorization: Bearer TOKEN`` is missing or wrong.
    """
    given = request.headers.get("Authorization", "")
    if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        raise web.HTTPUnauthorized(text="this endpoint needs the replica's token: Authorization: Bearer TOKEN\n")


def guard(token: str) -> Any:
    """Middleware that checks the token, and answers errors as JSON."""

    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        check_token(request, token)
        try:
            return await handler(request)
        except RollcastError as error:
            status = 400 if isinstance(error, RequestError) else 500
            return web.json_response({"error": encode_error(error)}, status=status)
        except json.JSONDecodeError as error:
            return web.json_response({"error": encode_error(RequestError(f"no JSON: {error}"))}, status=400)

    return checked


class _Stream:
    """A response of frames, which ends early when the engine is dead.

    Args:
        response: prepared response.
        watch: watch over the engine.
    """

    def __init__(self, response: web.StreamResponse, watch: EngineWatch) -> None:
        self._response, self._watch = response, watch

    async def send(self, **message: Any) -> None:
        """Send one frame."""
        await self._response.write(pack_frame(message))

    async def run(self, tasks: list[asyncio.Task[dict[str, Any]]], heartbeat_s: float) -> None:
        """Send each task's message when it ends, heartbeats meanwhile, and the engine's death instead of the rest."""
        waiting = set(tasks)
        while waiting:
            done, waiting = await asyncio.wait(waiting, timeout=heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                # Of a dead engine only finished outputs count: another replica can give the rest.
                if not self._watch.death or "output" in task.result():
                    await self.send(**task.result())
            if self._watch.death:
                await self.send(gone=self._watch.death)
                return
            if not done:
                await self.send(alive=True)
                self._watch.start()


class _Endpoints:
    """The routes, over one rollout."""

    def __init__(self, rollout: BaseRollout, watch: EngineWatch, heartbeat_s: float) -> None:
        self.rollout = rollout
        self._watch, self._heartbeat_s = watch, heartbeat_s
        self._updating = asyncio.Lock()

    async def health(self, request: web.Request) -> web.StreamResponse:
        return await self._reply(request, self._look())

    async def _look(self) -> dict[str, Any]:
        await self._watch.look()
        return {}

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer many requests; each output is a frame, sent when the output is there."""
        wanted = decode_requests(await request.read())
        return await self._respond(request, [asyncio.ensure_future(self._one(each)) for each in wanted])

    async def _one(self, request: RolloutRequest) -> dict[str, Any]:
        name = request.request_id
        try:
            return {"id": name, "output": encode_output(await self.rollout.generate(request))}
        except Exception as error:  # noqa: BLE001  # it travels to the caller
            return {"id": name, **await self._failure(error, f"request {name}")}

    async def _failure(self, error: Exception, what: str) -> dict[str, Any]:
        if not isinstance(error, RollcastError):
            logger.error("%s failed", what, exc_info=error)
        # The stream says so itself if the cause is the engine's death.
        await self._watch.blame(error)
        return {"error": encode_error(error)}

    async def abort(self, request: web.Request) -> web.StreamResponse:
        """End requests by the ids that their caller gave them, which no other caller's have."""
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
        # In a thread: reading waits for the trainer, and the other requests' heartbeats have to go on.
        tally, tensors = await asyncio.to_thread(_read_all, incoming)
        loaded = await self.rollout.update_adapter(AdapterWeights(config, tensors), version)
        return replace(tally.report(loaded.version), load_seconds=loaded.seconds)

    async def release(self, request: web.Request) -> web.StreamResponse:
        return await self._reply(request, self.rollout.release((await request.json())["tags"]))

    async def resume(self, request: web.Request) -> web.StreamResponse:
        return await self._reply(request, self.rollout.resume((await request.json())["tags"]))

    async def _reply(self, request: web.Request, work: Awaitable[Any]) -> web.StreamResponse:
        """Answer with the result of one piece of work."""
        return await self._respond(request, [asyncio.ensure_future(self._finish(work, request.path))])

    async def _finish(self, work: Awaitable[Any], path: str) -> dict[str, Any]:
        try:
            return {"result": await work or {}}
        except Exception as error:  # noqa: BLE001  # it travels to the caller
            return await self._failure(error, path)

    async def _respond(self, request: web.Request, tasks: list[asyncio.Task[dict[str, Any]]]) -> web.StreamResponse:
        async with _cancelled_at_the_end(tasks):
            response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
            await response.prepare(request)
            await _Stream(response, self._watch).run(tasks, self._heartbeat_s)
            await response.write_eof()
        return response


@contextlib.asynccontextmanager
async def _cancelled_at_the_end(tasks: list[asyncio.Task[dict[str, Any]]]) -> AsyncIterator[None]:
    """Cancel the tasks that are left when their caller has gone; the rollout aborts what is still under way."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


def _read_all(incoming: IncomingWeights) -> tuple[WeightTally, dict[str, Any]]:
    tally = WeightTally(incoming)
    return tally, {name: tensor.clone() for bucket in tally for name, tensor in bucket}


def build_app(
    rollout: BaseRollout, token: str, watch: EngineWatch, heartbeat_s: float = HEARTBEAT_S
) -> web.Application:
    """Return the application that a replica's callers in the run talk to.

    Args:
        rollout: rollout that answers.
        token: secret that lets a caller in.
        watch: watch over the rollout's engine.
        heartbeat_s: time between two heartbeats of a stream, in seconds.
    """
    app = web.Application(middlewares=[guard(token)], client_max_size=_MAX_BODY)
    endpoints = _Endpoints(rollout, watch, heartbeat_s)
    for name in ("health", "generate", "abort", "update_weights", "release", "resume"):
        app.router.add_post(f"/{name}", getattr(endpoints, name))
    return app
