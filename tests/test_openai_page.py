"""The blocks of docs/openai-api.md: a refused request has the error that the page shows, and the suite takes a server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from code_blocks import ROOT, blocks

from rollcast.contracts.rollout import RolloutSetup, SamplingParams
from rollcast_agents.contracts.renderer import RendererSetup
from rollcast_agents.gateway import Gateway
from rollcast_agents.renderers.chat_template import ChatTemplateRenderer
from rollcast_agents.session import RecordingSession
from rollcast_serving.testing.openai_api import OpenAISuite
from rollcast_serving.testing.openai_server import ScriptedRollout, ServedApi, build_byte_tokenizer, serve_in_thread


def test_the_page(tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    tokenizer = build_byte_tokenizer(tmp_path)
    setup = RolloutSetup(None, str(tmp_path), 0, tokenizer.pad_token_id, tokenizer.eos_token_id)

    @asynccontextmanager
    async def my_server() -> AsyncIterator[ServedApi]:
        rollout = ScriptedRollout(setup, tokenizer)
        renderer, sampling = ChatTemplateRenderer(RendererSetup(str(tmp_path))), SamplingParams(stop=("<own stop>",))
        session = RecordingSession("s", group_id="g", generate=rollout.generate, renderer=renderer, sampling=sampling)
        gateway = Gateway(renderer, str(tmp_path), sampling)
        await gateway.start()
        with gateway.open(session) as access:
            yield ServedApi(access.base_url, access.api_key, rollout)
        await gateway.close()

    by_title = {block.title: block.text for block in blocks("docs/openai-api.md") if block.title}
    namespace = {"pytest": pytest, "my_server": my_server}
    exec(by_title["test_my_server.py"], namespace)
    assert issubclass(namespace["TestMyServer"], OpenAISuite)  # type: ignore[arg-type]
    with serve_in_thread(my_server) as served, pytest.raises(openai.BadRequestError) as caught:
        exec(by_title["refused.py"], {"base_url": served.base_url, "api_key": served.api_key})
    (shown,) = (block.text for block in blocks("docs/openai-api.md") if block.text.startswith("openai.BadRequest"))
    assert shown.strip().endswith(f"Error code: 400 - {caught.value.body['message']}")


def test_the_page_lists_every_parameter() -> None:
    pytest.importorskip("openai")
    from openai.types import completion_create_params as completions
    from openai.types.chat import completion_create_params as chats

    page = (ROOT / "docs" / "openai-api.md").read_text()
    for reference in (chats.CompletionCreateParamsBase, completions.CompletionCreateParamsBase):
        assert [name for name in reference.__annotations__ if f"`{name}`" not in page] == []
