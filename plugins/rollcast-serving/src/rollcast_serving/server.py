"""The HTTP server of a replica: one rollout engine, and everything that callers may ask of it."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from rollcast.contracts.rollout import BaseRollout, RolloutOutput
from rollcast.contracts.weights import AdapterWeights, WeightBucket, WeightReport
from rollcast.errors import RequestError, RollcastError
from rollcast_serving.receiving import WeightTally
from rollcast_serving.weight_sync import weight_syncs
from rollcast_serving.wire import decode_request, encode_error, encode_output, encode_report

__all__ = ["IncomingWeights", "build_app", "check_token"]

logger = logging.getLogger(__name__)
_MAX_BODY = 1 << 30
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


class _Endpoints:
    """The routes, over one rollout."""

    def __init__(self, rollout: BaseRollout) -> None:
        self.rollout = rollout
        self._updating = asyncio.Lock()

    async def health(self, request: web.Request) -> web.Response:  # aiohttp gives it
        await self.rollout.check_health()
        return web.json_response({"ok": True})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Many requests; each output is a line, as soon as it is there."""
        wanted = (await request.json())["requests"]
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        tasks = [asyncio.ensure_future(self._one(entry)) for entry in wanted]
        try:
            for done in asyncio.as_completed(tasks):
                await response.write((await done).encode() + b"\n")
        finally:
            for task in tasks:
                task.cancel()  # the caller has gone; the rollout aborts what is still under way
        await response.write_eof()
        return response

    async def _one(self, entry: Mapping[str, Any]) -> str:
        identifier = entry.get("id") if isinstance(entry, Mapping) else None
        try:
            output: RolloutOutput = await self.rollout.generate(decode_request(entry))
            return json.dumps(encode_output(output))
        except Exception as error:  # it travels to the caller
            if not isinstance(error, RollcastError):
                logger.exception("request %s failed", identifier)
            return json.dumps({"id": identifier, "error": encode_error(error)})

    async def abort(self, request: web.Request) -> web.Response:
        await self.rollout.abort((await request.json()).get("ids"))
        return web.json_response({})

    async def update_weights(self, request: web.Request) -> web.Response:
        asked = await request.json()
        async with self._updating:
            incoming, version = IncomingWeights(asked["sync"], asked["source"]), int(asked["version"])
            if "adapter" in asked["source"]:
                report = await self._update_adapter(incoming, asked["source"]["adapter"], version)
            else:
                report = await self.rollout.update_weights(incoming, version)
        return web.json_response(encode_report(report))

    async def _update_adapter(self, incoming: IncomingWeights, config: Mapping[str, Any], version: int) -> WeightReport:
        tally = WeightTally(incoming)
        tensors = {name: tensor.clone() for bucket in tally for name, tensor in bucket}
        loaded = await self.rollout.update_adapter(AdapterWeights(config, tensors), version)
        return replace(tally.report(loaded.version), load_seconds=loaded.seconds)

    async def release(self, request: web.Request) -> web.Response:
        await self.rollout.release((await request.json())["tags"])
        return web.json_response({})

    async def resume(self, request: web.Request) -> web.Response:
        await self.rollout.resume((await request.json())["tags"])
        return web.json_response({})


def build_app(rollout: BaseRollout, token: str) -> web.Application:
    """The application that a replica's callers in the run talk to."""
    app = web.Application(middlewares=[guard(token)], client_max_size=_MAX_BODY)
    endpoints = _Endpoints(rollout)
    app.router.add_get("/health", endpoints.health)
    for name in ("generate", "abort", "update_weights", "release", "resume"):
        app.router.add_post(f"/{name}", getattr(endpoints, name))
    return app
