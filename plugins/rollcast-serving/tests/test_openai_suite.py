"""The replicas' endpoint passes the suite of OpenAI's API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import ClassVar

import pytest
from aiohttp import web

from rollcast.contracts.rollout import RolloutSetup, SamplingParams
from rollcast_serving.engine_watch import EngineWatch
from rollcast_serving.openai_api import build_openai_app
from rollcast_serving.testing.openai_api import OpenAISuite
from rollcast_serving.testing.openai_server import ScriptedRollout, ServedApi, build_byte_tokenizer, serve_in_thread


class TestReplicaEndpoint(OpenAISuite):
    has_tools: ClassVar = False
    has_seeds: ClassVar = True

    @pytest.fixture(scope="class")
    @classmethod
    def served(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApi]:
        folder = tmp_path_factory.mktemp("tokenizer")
        tokenizer = build_byte_tokenizer(folder)
        setup = RolloutSetup(None, str(folder), 0, tokenizer.pad_token_id, tokenizer.eos_token_id)

        @asynccontextmanager
        async def serve() -> AsyncIterator[ServedApi]:
            rollout = ScriptedRollout(setup, tokenizer)
            default = SamplingParams(max_tokens=256, stop=("<own stop>",))
            app = build_openai_app(rollout, str(folder), "secret", EngineWatch(rollout, lambda: None), default)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield ServedApi(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "secret", rollout)
            await runner.cleanup()

        with serve_in_thread(serve) as served:
            yield served
