"""The gateway passes the suite of OpenAI's API, and records exactly what it sampled."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from rollcast.contracts.rollout import RolloutSetup, SamplingParams
from rollcast_agents.contracts.renderer import RendererSetup
from rollcast_agents.gateway import Gateway
from rollcast_agents.renderers.chat_template import ChatTemplateRenderer
from rollcast_agents.session import RecordingSession
from rollcast_serving.testing.openai_api import OpenAISuite
from rollcast_serving.testing.openai_server import ScriptedRollout, ServedApi, build_byte_tokenizer, serve_in_thread


class TestGateway(OpenAISuite):
    @pytest.fixture(scope="class")
    @classmethod
    def served(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApi]:
        folder = tmp_path_factory.mktemp("tokenizer")
        tokenizer = build_byte_tokenizer(folder)
        setup = RolloutSetup(None, str(folder), 0, tokenizer.pad_token_id, tokenizer.eos_token_id)

        @asynccontextmanager
        async def serve() -> AsyncIterator[ServedApi]:
            rollout = ScriptedRollout(setup, tokenizer)
            renderer = ChatTemplateRenderer(RendererSetup(str(folder)))
            sampling = SamplingParams(max_tokens=256, stop=("<own stop>",))
            session = RecordingSession(
                "s0", group_id="g0", generate=rollout.generate, renderer=renderer, sampling=sampling
            )
            gateway = Gateway(renderer, str(folder), sampling)
            await gateway.start()
            with gateway.open(session) as access:
                yield ServedApi(access.base_url, access.api_key, rollout)
            await gateway.close()
            sampled = sum(segment.sampled for each in session.trajectories() for segment in each.segments)
            assert sampled == session.turns == len(rollout.requests)

        with serve_in_thread(serve) as served:
            yield served
