"""The process of a replica: ``python -m rollcast_serving.process``, started by :mod:`rollcast_serving.launcher`.

It reads its settings as JSON from standard input, and writes one line of JSON to a given file descriptor: its ports, or
the error that prevented its start. On the nodes after the first of a replica that spans nodes, it runs a part of the
engine and serves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web
from omegaconf import OmegaConf

from rollcast import build_section
from rollcast.contracts.logs import set_log_level
from rollcast.contracts.rollout import BaseRollout, EngineNode, EnginePart, RolloutSetup, rollouts
from rollcast.errors import RolloutError
from rollcast_serving.engine_watch import EngineWatch
from rollcast_serving.in_flight import hold_requests
from rollcast_serving.lifeline import Lifeline, Meeting, connect, listen
from rollcast_serving.openai_api import build_openai_app
from rollcast_serving.requests import configured_sampling
from rollcast_serving.server import build_app
from rollcast_serving.wire import encode_error

__all__ = ["main"]

logger = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1
#: Seconds for callers to hear that the engine is dead before the process ends.
_FAREWELL_S = 2.0
#: Exit code of a replica whose engine died.
_ENGINE_DIED = 3
#: Largest number of new tokens for requests of OpenAI's API that do not set one.
_MAX_TOKENS = 256
#: Seconds between checks of a node's part of an engine.
_PART_POLL_S = 1.0


def _end_with_parent(parent: int) -> None:
    """Make the kernel end this process when its parent is gone (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(1)


class _Parent:
    """The pipe to the process that started this one, for one message."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send the message, unless one was sent before."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with os.fdopen(descriptor, "w") as file:
                file.write(json.dumps(message) + "\n")


class _Losses:
    """The end of another process of a replica that spans nodes.

    Attributes:
        handler: called with the cause once this process serves; None while it starts.
    """

    def __init__(self, parent: _Parent) -> None:
        self._parent = parent
        self.handler: Callable[[str], None] | None = None

    def __call__(self, process: str) -> None:
        cause = f"the replica spans nodes, and {process}"
        logger.error("%s", cause)
        if self.handler is not None:
            self.handler(cause)
            return
        # An engine that starts would wait for the other process without end.
        self._parent.tell({"error": encode_error(RolloutError(cause))})
        os._exit(1)


def _setup(spec: Mapping[str, Any]) -> tuple[type[BaseRollout], RolloutSetup]:
    rollout_class = rollouts.get(spec["rollout"]["name"], requested_by="rollout.name")
    config: Any = build_section(rollout_class.config_schema, OmegaConf.create(spec["rollout"]), "rollout")
    setup = RolloutSetup(
        config,
        spec["model_path"],
        spec["seed"],
        spec["pad_token_id"],
        spec["eos_token_id"],
        tuple(spec["stop_token_ids"]),
        spec["trust_remote_code"],
        EngineNode(**spec["node"]),
    )
    return rollout_class, setup


def _meet(spec: Mapping[str, Any], losses: _Losses) -> Lifeline | None:
    """Return the connections to the replica's processes on other nodes; None if there are none."""
    if spec["meeting"] is None:
        return None
    meeting, node = Meeting(**spec["meeting"]), EngineNode(**spec["node"])
    if node.rank:
        return connect(meeting, node.host, losses)
    return listen(socket.socket(fileno=spec["listener"]), meeting.token, losses)


async def _listen(app: web.Application, host: str) -> tuple[web.AppRunner, int]:
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_FAREWELL_S)
    await runner.setup()
    site = web.TCPSite(runner, host, 0)
    await site.start()
    return runner, int(runner.addresses[0][1])


async def _serve(rollout: BaseRollout, spec: Mapping[str, Any], parent: _Parent, losses: _Losses) -> int:
    """Serve until told to stop, or until the engine is dead; return the exit code."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    code = 0

    def end() -> None:
        nonlocal code
        code = _ENGINE_DIED
        loop.call_later(_FAREWELL_S, stopping.set)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    await rollout.check_health()
    watch = EngineWatch(rollout, end)

    def fail(cause: str) -> None:
        loop.call_soon_threadsafe(watch.mark_dead, cause)

    losses.handler = fail
    runner, port = await _listen(build_app(rollout, spec["token"], watch), spec["host"])
    # Always on the loopback, independent of the other server's address: it is for agents on this machine.
    default = configured_sampling(rollout.setup.config, _MAX_TOKENS)
    trust = spec["trust_remote_code"]
    openai_app = build_openai_app(rollout, spec["model_path"], spec["token"], watch, default, trust_remote_code=trust)
    openai, openai_port = await _listen(openai_app, "127.0.0.1")
    parent.tell({"port": port, "openai_port": openai_port})
    await stopping.wait()
    for server in (runner, openai):
        await server.cleanup()
    return code


def _serve_part(part: EnginePart, parent: _Parent, losses: _Losses) -> int:
    """Watch this node's part of an engine until the part or another node's process ends; return the exit code."""
    ended = threading.Event()
    losses.handler = lambda _: ended.set()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    parent.tell({"port": 0, "openai_port": 0})
    try:
        while not ended.wait(_PART_POLL_S):
            part.check_health()
    except RolloutError:
        logger.exception("this node's part of the engine died")
        return _ENGINE_DIED
    return 0


def main() -> int:
    """Serve until told to stop, until the engine is dead, or until the parent is gone; return the exit code."""
    spec = json.load(sys.stdin)
    parent = _Parent(int(spec["tell"]))
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _end_with_parent(int(spec["parent"]))
    losses = _Losses(parent)
    with contextlib.ExitStack() as stack:
        try:
            set_log_level(logging.INFO, others=logging.INFO)
            if (lifeline := _meet(spec, losses)) is not None:
                stack.callback(lifeline.close)
            rollout_class, setup = _setup(spec)
            engine = rollout_class.join(setup) if setup.node.rank else rollout_class(setup)
            stack.callback(engine.close)
        except Exception as error:
            logger.exception("the rollout cannot be built")
            parent.tell({"error": encode_error(error)})
            return 1
        if isinstance(engine, EnginePart):
            return _serve_part(engine, parent, losses)
        rollout = hold_requests(engine, setup.config.update_in_flight)
        return asyncio.run(_serve(rollout, spec, parent, losses))


if __name__ == "__main__":
    sys.exit(main())
