"""The process of a replica: ``python -m rollcast_serving.process``, started by :mod:`rollcast_serving.launcher`.

It reads its settings as JSON from standard input, and writes one line of JSON to a given file descriptor: its ports, or
the error that prevented its start.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from aiohttp import web
from omegaconf import OmegaConf

from rollcast import build_section
from rollcast.contracts.rollout import BaseRollout, RolloutSetup, rollouts
from rollcast_serving.engine_watch import EngineWatch
from rollcast_serving.in_flight import hold_requests
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


def _end_with_parent(parent: int) -> None:
    """Make the kernel end this process when its parent is gone (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(1)


def _build(spec: Mapping[str, Any]) -> BaseRollout:
    rollout_class = rollouts.get(spec["rollout"]["name"], requested_by="rollout.name")
    config: Any = build_section(rollout_class.config_schema, OmegaConf.create(spec["rollout"]), "rollout")
    rollout = rollout_class(
        RolloutSetup(
            config,
            spec["model_path"],
            spec["seed"],
            spec["pad_token_id"],
            spec["eos_token_id"],
            tuple(spec["stop_token_ids"]),
            spec["trust_remote_code"],
        )
    )
    return hold_requests(rollout, config.update_in_flight)


async def _listen(app: web.Application, host: str) -> tuple[web.AppRunner, int]:
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_FAREWELL_S)
    await runner.setup()
    site = web.TCPSite(runner, host, 0)
    await site.start()
    return runner, int(runner.addresses[0][1])


async def _serve(rollout: BaseRollout, spec: Mapping[str, Any], tell: int) -> int:
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
    runner, port = await _listen(build_app(rollout, spec["token"], watch), spec["host"])
    # Always on the loopback, independent of the other server's address: it is for agents on this machine.
    default = configured_sampling(rollout.setup.config, _MAX_TOKENS)
    trust = spec["trust_remote_code"]
    openai_app = build_openai_app(rollout, spec["model_path"], spec["token"], watch, default, trust_remote_code=trust)
    openai, openai_port = await _listen(openai_app, "127.0.0.1")
    _tell(tell, {"port": port, "openai_port": openai_port})
    await stopping.wait()
    for each in (runner, openai):
        await each.cleanup()
    return code


def _tell(tell: int, message: Mapping[str, Any]) -> None:
    with os.fdopen(tell, "w") as file:
        file.write(json.dumps(message) + "\n")


def main() -> int:
    """Serve until told to stop, until the engine is dead, or until the parent is gone; return the exit code."""
    spec = json.load(sys.stdin)
    tell = int(spec["tell"])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _end_with_parent(int(spec["parent"]))
    try:
        rollout = _build(spec)
    except Exception as error:
        logger.exception("the rollout cannot be built")
        _tell(tell, {"error": encode_error(error)})
        return 1
    try:
        return asyncio.run(_serve(rollout, spec, tell))
    finally:
        rollout.close()


if __name__ == "__main__":
    sys.exit(main())
